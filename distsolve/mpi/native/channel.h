/* Datagrams between the watchdogs of a job: they need nothing of MPI, which may be what hangs. */
#ifndef DISTSOLVE_CHANNEL_H
#define DISTSOLVE_CHANNEL_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { QUESTION = 1, ANSWER = 2, SHOW_STACKS = 3, KEY_SIZE = 480 };

typedef struct {
  uint64_t token;  /* of the receiver: what comes from elsewhere is dropped */
  int64_t round;   /* which question this answers */
  int32_t kind;
  int32_t rank;    /* of the sender, in the world */
  int32_t comm;    /* that the question is about */
  int32_t inside;  /* the communicator of the call that the sender is in; 0: in none */
  int64_t number;  /* of that call among the collectives of its communicator */
  double seconds;  /* since it was entered, or since the last call came back */
  char key[KEY_SIZE]; /* where the sender is, in words */
} Packet;

typedef struct {
  uint64_t token;
  uint32_t address; /* in network order, as the port; 0 where the place is not known */
  uint16_t port;
} Place;

/* A socket on a port that the system chooses; -1 where there is none to be had. */
static int channel_open(uint16_t *port) {
  struct sockaddr_in place = {0};
  socklen_t size = sizeof(place);
  int channel = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  int room = 4 << 20; /* for the answers of many ranks at once; the system may give less */
  place.sin_family = AF_INET;
  if (channel < 0) return -1;
  setsockopt(channel, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
  if (bind(channel, (struct sockaddr *)&place, size) != 0 ||
      getsockname(channel, (struct sockaddr *)&place, &size) != 0) {
    close(channel);
    return -1;
  }
  *port = place.sin_port;
  return channel;
}

static void channel_send(int channel, Place to, Packet *packet) {
  struct sockaddr_in place = {0};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = to.address;
  place.sin_port = to.port;
  packet->token = to.token;
  sendto(channel, packet, sizeof(*packet), MSG_DONTWAIT, (struct sockaddr *)&place, sizeof(place));
}

/* Wait for a packet to this process, at most so long. */
static int channel_receive(int channel, uint64_t token, Packet *packet, int milliseconds) {
  struct pollfd waiting = {channel, POLLIN, 0};
  if (poll(&waiting, 1, milliseconds) <= 0) return 0;
  if (recv(channel, packet, sizeof(*packet), MSG_DONTWAIT) != (ssize_t)sizeof(*packet)) return 0;
  packet->key[KEY_SIZE - 1] = 0;
  return packet->token == token;
}

static void sleep_milliseconds(int milliseconds) { poll(NULL, 0, milliseconds); }

/* End this process in so many seconds, whatever hangs then. */
static void end_within(unsigned seconds) {
  struct sigaction plain = {0};
  sigset_t alarm_only;
  plain.sa_handler = SIG_DFL;
  sigaction(SIGALRM, &plain, NULL);
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
  alarm(seconds);
}

#endif
