/* Calls a handler of XLA's with a call frame made by hand, on memory of the driver without a GPU. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

struct buffer {
  int64_t dtype;
  void *data;
  int64_t rank;
  int64_t dims[4];
};

static XLA_FFI_Error *make_error(XLA_FFI_Error_Create_Args *args) {
  return (XLA_FFI_Error *)strdup(args->message);
}

static void destroy_error(XLA_FFI_Error_Destroy_Args *args) { free(args->error); }

static XLA_FFI_Error *get_stream(XLA_FFI_Stream_Get_Args *args) {
  args->stream = args->ctx;
  return args->stream == NULL ? (XLA_FFI_Error *)strdup("no stream") : NULL;
}

static void fill(XLA_FFI_Buffer *made, void **pointers, const struct buffer *buffers, int n) {
  for (int i = 0; i < n; ++i) {
    made[i].struct_size = sizeof(XLA_FFI_Buffer);
    made[i].dtype = (XLA_FFI_DataType)buffers[i].dtype;
    made[i].data = buffers[i].data;
    made[i].rank = buffers[i].rank;
    made[i].dims = (int64_t *)buffers[i].dims;
    pointers[i] = &made[i];
  }
}

/* Attributes: each a number, or where `lengths` is not negative that many. The text of the error is
 * the caller's to free; NULL where there is none. */
char *fake_call(XLA_FFI_Handler *handler, struct stream *stream, const struct buffer *args,
                int n_args, const struct buffer *rets, int n_rets, const int64_t **values,
                const int *lengths, int n_attrs) {
  XLA_FFI_Api api;
  XLA_FFI_Buffer arg_buffers[16], ret_buffers[16];
  void *arg_pointers[16], *ret_pointers[16], *attrs[16];
  XLA_FFI_Scalar scalars[16];
  XLA_FFI_Array arrays[16];
  XLA_FFI_CallFrame frame;
  memset(&api, 0, sizeof(api));
  memset(&frame, 0, sizeof(frame));
  api.XLA_FFI_Error_Create = make_error;
  api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_Stream_Get = get_stream;
  fill(arg_buffers, arg_pointers, args, n_args);
  fill(ret_buffers, ret_pointers, rets, n_rets);
  for (int i = 0; i < n_attrs; ++i) {
    if (lengths[i] < 0) {
      scalars[i].dtype = XLA_FFI_DataType_S64;
      scalars[i].value = (void *)values[i];
      attrs[i] = &scalars[i];
    } else {
      arrays[i].dtype = XLA_FFI_DataType_S64;
      arrays[i].size = lengths[i];
      arrays[i].data = (void *)values[i];
      attrs[i] = &arrays[i];
    }
  }
  frame.struct_size = sizeof(frame);
  frame.api = &api;
  frame.ctx = (XLA_FFI_ExecutionContext *)stream;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.size = n_args;
  frame.args.args = arg_pointers;
  frame.rets.size = n_rets;
  frame.rets.rets = ret_pointers;
  frame.attrs.size = n_attrs;
  frame.attrs.attrs = attrs;
  expected = stream;
  char *error = (char *)handler(&frame);
  if (depth != 0) violate("a context was not left");
  depth = 0;
  current = NULL;
  return error;
}
