/* A caller's own transport, as ra_comm_custom takes it: every pair of ranks has a stream socket between them, and ranks may be
 * threads or processes. On the wire a message is its tag, its length and its bytes. Sends are written in order, receives are
 * matched by tag, and what nobody has asked for yet is stored. Every call of wait moves whatever can be moved.
 *
 * Header only, because each tests/transport_*.c is a program of its own. */
#ifndef TESTS_TRANSPORT_SOCKETS_H
#define TESTS_TRANSPORT_SOCKETS_H

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "ringattn.h"

typedef struct socket_request {
    struct socket_request *next;
    int peer;
    bool receiving, done;
    ra_status status;
    uint64_t head[2]; /* tag, length */
    char *buf;
    size_t bytes, moved; /* moved counts the head of a send too */
} socket_request;

typedef struct socket_peer {
    int fd;
    bool closed;
    socket_request *sends, *receives, *stored; /* queues in order */
    uint64_t head[2];                          /* of the message that is coming in */
    size_t head_got;
    socket_request *target; /* where it goes: a receive, or a stored message */
} socket_peer;

typedef struct socket_rank {
    int rank, ranks;
    socket_peer *peers;
} socket_rank;

static inline void socket_append(socket_request **queue, socket_request *request) {
    while (*queue) queue = &(*queue)->next;
    *queue = request;
    request->next = NULL;
}

static inline void socket_remove(socket_request **queue, const socket_request *request) {
    while (*queue && *queue != request) queue = &(*queue)->next;
    if (*queue) *queue = (*queue)->next;
}

static inline socket_request *socket_find(socket_request *queue, uint64_t tag) {
    while (queue && queue->head[0] != tag) queue = queue->next;
    return queue;
}

static inline socket_request *socket_new(int peer, uint64_t tag, bool receiving, void *buf, size_t bytes) {
    socket_request *request = calloc(1, sizeof *request);
    if (!request) return NULL;
    *request = (socket_request){.peer = peer, .receiving = receiving, .head = {tag, bytes}, .buf = buf, .bytes = bytes};
    return request;
}

/* Head and bytes go together: a rank that leaves between the two would have to keep the buffer that waits for the rest. */
static inline ssize_t socket_send(const socket_peer *peer, socket_request *send_) {
    size_t head = send_->moved < sizeof send_->head ? sizeof send_->head - send_->moved : 0;
    size_t at = send_->moved + head - sizeof send_->head;
    struct iovec parts[] = {{(char *)send_->head + sizeof send_->head - head, head}, {send_->buf + at, send_->bytes - at}};
    return sendmsg(peer->fd, &(struct msghdr){.msg_iov = parts, .msg_iovlen = 2}, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static inline void socket_write(socket_peer *peer) {
    while (peer->sends && !peer->closed) {
        socket_request *send_ = peer->sends;
        while (send_->moved < sizeof send_->head + send_->bytes) {
            ssize_t wrote = socket_send(peer, send_);
            if (wrote < 0 && errno == EINTR) continue;
            if (wrote < 0 && errno != EAGAIN) peer->closed = true;
            if (wrote < 0) return;
            send_->moved += (size_t)wrote;
        }
        peer->sends = send_->next;
        send_->done = true;
    }
}

static inline void socket_deliver(socket_request *receive, const socket_request *message) {
    size_t bytes = message->bytes < receive->bytes ? message->bytes : receive->bytes;
    if (bytes > 0) memcpy(receive->buf, message->buf, bytes);
    receive->moved = message->bytes;
    receive->status = message->bytes > receive->bytes ? RA_PROTOCOL : RA_OK;
    receive->done = true;
}

/* True if something came and more may be there. */
static inline bool socket_read(socket_peer *peer) {
    bool head = peer->head_got < sizeof peer->head;
    socket_request *target = peer->target;
    char *to = head ? (char *)peer->head + peer->head_got : target->buf + target->moved;
    size_t left = head ? sizeof peer->head - peer->head_got : peer->head[1] - target->moved;
    ssize_t got = left > 0 ? recv(peer->fd, to, left, MSG_DONTWAIT) : 0;
    if (got == 0 && left > 0) peer->closed = true;
    if (got < 0 && errno != EAGAIN && errno != EINTR) peer->closed = true;
    if (got < 0 || peer->closed) return got < 0 && errno == EINTR;
    if (head) peer->head_got += (size_t)got;
    else target->moved += (size_t)got;
    if (head && peer->head_got == sizeof peer->head) {
        socket_request *receive = socket_find(peer->receives, peer->head[0]);
        if (receive && receive->bytes >= peer->head[1]) {
            socket_remove(&peer->receives, receive);
            peer->target = receive;
        } else {
            char *room = malloc(peer->head[1] + 1);
            peer->target = socket_new(-1, peer->head[0], true, room, peer->head[1]);
            if (!room || !peer->target) abort();
        }
        target = peer->target;
    }
    if (peer->head_got == sizeof peer->head && target->moved == peer->head[1]) {
        peer->head_got = 0;
        peer->target = NULL;
        if (target->peer >= 0) {
            target->done = true;
        } else {
            socket_request *receive = socket_find(peer->receives, target->head[0]);
            if (receive) {
                socket_remove(&peer->receives, receive);
                socket_deliver(receive, target);
                free(target->buf);
                free(target);
            } else {
                socket_append(&peer->stored, target);
            }
        }
    }
    return true;
}

static inline void socket_progress(socket_rank *self, double seconds) {
    struct pollfd fds[64];
    int count = 0;
    for (int peer = 0; peer < self->ranks; peer++) {
        socket_peer *p = &self->peers[peer];
        if (p->closed) continue;
        socket_write(p);
        fds[count++] = (struct pollfd){.fd = p->fd, .events = (short)(POLLIN | (p->sends ? POLLOUT : 0))};
    }
    poll(fds, (nfds_t)count, (int)(seconds * 1000 + 0.999));
    for (int peer = 0; peer < self->ranks; peer++) {
        socket_peer *p = &self->peers[peer];
        while (!p->closed && socket_read(p)) continue;
        if (!p->closed) socket_write(p);
    }
}

static inline ra_status socket_post_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request) {
    socket_rank *self = ctx;
    socket_request *receive = socket_new(peer, tag, true, buf, bytes);
    if (!receive) return RA_NOMEM;
    socket_request *stored = socket_find(self->peers[peer].stored, tag);
    if (stored) {
        socket_remove(&self->peers[peer].stored, stored);
        socket_deliver(receive, stored);
        free(stored->buf);
        free(stored);
    } else {
        socket_append(&self->peers[peer].receives, receive);
    }
    *request = receive;
    return RA_OK;
}

static inline ra_status socket_post_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request) {
    socket_rank *self = ctx;
    socket_request *send_ = socket_new(peer, tag, false, (void *)(uintptr_t)buf, bytes);
    if (!send_) return RA_NOMEM;
    socket_append(&self->peers[peer].sends, send_);
    socket_write(&self->peers[peer]);
    *request = send_;
    return RA_OK;
}

static inline double socket_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline ra_status socket_wait(void *ctx, void *request_, double seconds, int *done, size_t *received) {
    socket_rank *self = ctx;
    socket_request *request = request_;
    double until = socket_now() + seconds;
    *done = 0;
    for (bool first = true; !request->done; first = false) {
        double left = until - socket_now();
        if (left <= 0 && !first) return RA_OK;
        if (self->peers[request->peer].closed) {
            socket_remove(request->receiving ? &self->peers[request->peer].receives : &self->peers[request->peer].sends,
                          request);
            if (self->peers[request->peer].target == request) self->peers[request->peer].target = NULL;
            free(request);
            return RA_PEER_LOST;
        }
        socket_progress(self, first || left < 0 ? 0 : left < 0.005 ? left : 0.005);
    }
    ra_status status = request->status;
    *done = status == RA_OK;
    if (received) *received = request->moved;
    free(request);
    return status;
}

/* A message that is partly on its way must be kept: its buffer will be read or written when the rest is. */
static inline ra_status socket_cancel(void *ctx, void *request_) {
    socket_rank *self = ctx;
    socket_request *request = request_;
    socket_peer *peer = &self->peers[request->peer];
    bool partly = !request->done && (request->receiving ? peer->target == request : request->moved > 0) && !peer->closed;
    if (partly) return RA_ABORTED;
    if (peer->target == request) peer->target = NULL;
    socket_remove(request->receiving ? &peer->receives : &peer->sends, request);
    free(request);
    return RA_OK;
}

static inline void socket_destroy(void *ctx) {
    socket_rank *self = ctx;
    for (int rank = 0; rank < self->ranks; rank++) {
        socket_peer *peer = &self->peers[rank];
        close(peer->fd);
        if (peer->target && peer->target->peer < 0) socket_append(&peer->stored, peer->target);
        else free(peer->target);
        while (peer->stored) {
            socket_request *stored = peer->stored;
            peer->stored = stored->next;
            free(stored->buf);
            free(stored);
        }
        while (peer->sends) { /* only those that were kept */
            socket_request *send_ = peer->sends;
            peer->sends = send_->next;
            free(send_);
        }
    }
    free(self->peers);
    free(self);
}

/* One context a rank. With processes: call before fork, then each process closes the others' with socket_destroy. */
static inline ra_status sockets_create(int ranks, ra_comm_ops *ops, void **ctxs) {
    for (int rank = 0; rank < ranks; rank++) {
        socket_rank *self = calloc(1, sizeof *self);
        self->rank = rank;
        self->ranks = ranks;
        self->peers = calloc((size_t)ranks, sizeof *self->peers);
        ctxs[rank] = self;
    }
    for (int a = 0; a < ranks; a++) {
        for (int b = a; b < ranks; b++) {
            int fds[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return RA_IO;
            ((socket_rank *)ctxs[a])->peers[b].fd = fds[0];
            if (a == b) close(fds[1]);
            else ((socket_rank *)ctxs[b])->peers[a].fd = fds[1];
        }
        ((socket_rank *)ctxs[a])->peers[a].closed = true; /* a rank does not send to itself over sockets */
    }
    *ops = (ra_comm_ops){.struct_size = sizeof *ops,
                         .post_recv = socket_post_recv,
                         .post_send = socket_post_send,
                         .wait = socket_wait,
                         .cancel = socket_cancel,
                         .destroy = socket_destroy};
    return RA_OK;
}

#endif
