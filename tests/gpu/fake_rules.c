/* Rules that were broken, kept as text, and failures that a test orders. */
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- rules ---- */

static pthread_mutex_t rules = PTHREAD_MUTEX_INITIALIZER;
static char violations[4096];

void violate(const char *rule) {
  pthread_mutex_lock(&rules);
  if (strstr(violations, rule) == NULL &&
      strlen(violations) + strlen(rule) + 3 < sizeof(violations)) {
    if (violations[0]) strcat(violations, "; ");
    strcat(violations, rule);
  }
  pthread_mutex_unlock(&rules);
}

const char *fake_violations(void) { return violations; }

/* ---- failures to order ---- */

static char failing[64];
static int calls_until_failure;

void fake_fail(const char *function, int calls) {
  snprintf(failing, sizeof(failing), "%s", function);
  calls_until_failure = calls;
}

void forget_rules(void) { violations[0] = failing[0] = 0; }

int fails(const char *function) {
  if (strcmp(function, failing) != 0 || --calls_until_failure > 0) return 0;
  failing[0] = 0;
  return 1;
}

int cuGetErrorString(int code, const char **text) {
  *text = code == FAILURE ? "as ordered" : "unknown";
  return 0;
}
