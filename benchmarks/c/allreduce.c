/* The bare MPI program that the JAX contenders are compared with.
 *
 * It repeats MPI_Allreduce(MPI_IN_PLACE, ..., MPI_SUM) on float32 data, as one call or in chunks,
 * and prints one JSON line on rank 0: seconds per repetition (slowest rank) and the growth of the
 * peak resident memory (largest rank) over all repetitions.
 *
 * usage: allreduce --elements N --iterations N [--chunk-elements N] [--scale 0|1] [--threads 0|1]
 *
 * `--threads 1` asks for MPI_THREAD_MULTIPLE, as mpi4py does; MPICH chooses other algorithms then.
 */
#include <getopt.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    long elements, iterations, chunk, scale, threads;
} Options;

static void stop(const char *message)
{
    int started;
    fprintf(stderr, "allreduce: %s\n", message);
    MPI_Initialized(&started);
    if (started)
        MPI_Abort(MPI_COMM_WORLD, 2);
    exit(2);
}

static Options read_options(int argc, char **argv)
{
    static const struct option names[] = {{"elements", required_argument, NULL, 'e'},
                                          {"iterations", required_argument, NULL, 'i'},
                                          {"chunk-elements", required_argument, NULL, 'c'},
                                          {"scale", required_argument, NULL, 's'},
                                          {"threads", required_argument, NULL, 't'},
                                          {NULL, 0, NULL, 0}};
    Options options = {0, 0, 0, 0, 1};
    int key;
    while ((key = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (key) {
        case 'e': options.elements = atol(optarg); break;
        case 'i': options.iterations = atol(optarg); break;
        case 'c': options.chunk = atol(optarg); break;
        case 's': options.scale = atol(optarg); break;
        case 't': options.threads = atol(optarg); break;
        default: stop("unknown option");
        }
    }
    if (options.elements < 1 || options.iterations < 1)
        stop("--elements and --iterations must be at least 1");
    if (options.chunk < 1)
        options.chunk = options.elements;
    return options;
}

static double status_mib(const char *field)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    double kib = -1;
    if (!file)
        stop("cannot read /proc/self/status");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0)
            kib = atof(line + strlen(field) + 1);
    fclose(file);
    return kib / 1024;
}

/* Without the reset the earlier peak stays: growth is then too large, never too small. */
static void reset_peak(void)
{
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (!file)
        return;
    fputs("5", file);
    fclose(file);
}

static void fill(float *x, long elements, double value)
{
    for (long i = 0; i < elements; ++i)
        x[i] = (float)value;
}

static void repeat(float *x, Options options, long iterations, float factor)
{
    for (long iteration = 0; iteration < iterations; ++iteration) {
        for (long start = 0; start < options.elements; start += options.chunk) {
            long left = options.elements - start;
            int count = (int)(left < options.chunk ? left : options.chunk);
            MPI_Allreduce(MPI_IN_PLACE, x + start, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        }
        if (options.scale)
            for (long i = 0; i < options.elements; ++i)
                x[i] *= factor;
    }
}

int main(int argc, char **argv)
{
    Options options = read_options(argc, argv);
    int rank, size, provided;
    int wanted = options.threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, wanted, &provided);
    if (provided < wanted)
        stop("this MPI does not give MPI_THREAD_MULTIPLE");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    float *x = malloc((size_t)options.elements * sizeof *x);
    if (!x)
        stop("not enough memory for the buffer");

    /* Both sums come out the same: each unscaled iteration after the first multiplies by size. */
    double first = rank + 1;
    if (!options.scale)
        first *= pow(size, -(double)options.iterations);
    fill(x, options.elements, first);

    /* The first calls build the connections. A loop is run once beforehand, as the jitted ones
     * are; a single call is not, because that would hide the memory it needs. */
    Options one = {1, 1, 1, 0, 0};
    float warm = 0;
    repeat(&warm, one, 1000, 1.0f);
    if (options.iterations > 1) {
        repeat(x, options, options.iterations, 1.0f / (float)size);
        fill(x, options.elements, first);
    }

    MPI_Barrier(MPI_COMM_WORLD);
    reset_peak();
    double memory = status_mib("VmRSS:");
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    repeat(x, options, options.iterations, 1.0f / (float)size);
    double seconds = (MPI_Wtime() - began) / (double)options.iterations;
    double growth = status_mib("VmHWM:") - memory;

    double expected = (size + 1) / 2.0;
    for (long i = 0; i < options.elements; ++i)
        if (fabs(x[i] - expected) > 1e-3 * expected)
            stop("wrong result");

    double local[2] = {seconds, growth}, worst[2];
    MPI_Reduce(local, worst, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("{\"seconds\": %.9g, \"peak_growth_mib\": %.6g, \"iterations\": %ld}\n", worst[0],
               worst[1], options.iterations);
    free(x);
    MPI_Finalize();
    return 0;
}
