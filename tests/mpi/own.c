/* A program that uses MPI itself, with the thread level of its first argument: ranks of a part of the world form a ring on
 * their own communicator, between MPI calls of the program; more than once; and MPI is finalized by the program, with the
 * second argument "early" while a communicator is still open. */
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringattn_mpi.h"

static int world_rank;

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            fprintf(stderr, "rank %d, line %d: %s fails (%s)\n", world_rank, __LINE__, #condition, ra_last_error());           \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                                      \
        }                                                                                                                      \
    } while (0)

/* q = 0 makes every weight equal: out is the mean of all values, which are their positions. */
static void mean_of_positions(ra_comm *comm) {
    enum { N = 90, D = 8 };
    int rank = ra_comm_rank(comm), ranks = ra_comm_size(comm);
    ra_attention_desc desc;
    ra_shard rows;
    ra_plan *plan;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = 1;
    desc.head_dim = D;
    desc.threads = 1;
    CHECK(ra_shard_rows(&desc, rank, ranks, &rows, NULL) == RA_OK);
    size_t bytes = (size_t)(rows.count * D) * sizeof(float) + 1;
    float *q = calloc(1, bytes), *k = calloc(1, bytes), *v = calloc(1, bytes), *out = calloc(1, bytes);
    for (int64_t i = 0; i < rows.count * D; i++) {
        k[i] = (float)(i % 7);
        v[i] = (float)(rows.rows[0].start + i / D * rows.rows[0].step);
    }
    CHECK(ra_plan_create(comm, &desc, &plan) == RA_OK);
    ra_forward_args args = {.q = ra_tensor_bnhd(q, rows.count, 1, D),
                            .k = ra_tensor_bnhd(k, rows.count, 1, D),
                            .v = ra_tensor_bnhd(v, rows.count, 1, D),
                            .out = ra_tensor_bnhd(out, rows.count, 1, D)};
    CHECK(ra_forward(plan, &args) == RA_OK);
    for (int64_t i = 0; i < rows.count * D; i++) CHECK(fabsf(out[i] - (N - 1) / 2.0f) < 1e-3f);
    ra_plan_destroy(plan);
    free(q);
    free(k);
    free(v);
    free(out);
}

static void *open_elsewhere(void *level) {
    ra_comm *comm = NULL;
    CHECK(ra_comm_mpi(MPI_COMM_SELF, &comm) == RA_INVALID && comm == NULL);
    CHECK(strstr(ra_last_error(), *(const int *)level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE, " : "MPI_THREAD_FUNNELED, "));
    return NULL;
}

/* What ra_comm_mpi refuses, and says why. */
static void wrong_communicators(int level) {
    ra_comm *comm = NULL;
    MPI_Comm half, inter;
    CHECK(ra_comm_mpi(MPI_COMM_NULL, &comm) == RA_INVALID && comm == NULL);
    CHECK(ra_comm_mpi_handle(&comm, 3, "openmpi", &comm) != RA_OK && ra_comm_mpi_handle(NULL, 8, "mpich", &comm) == RA_INVALID);
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - world_rank % 2, 7, &inter);
    CHECK(ra_comm_mpi(inter, &comm) == RA_INVALID && comm == NULL && strstr(ra_last_error(), "inter-communicator"));
    MPI_Comm_free(&inter);
    MPI_Comm_free(&half);
    pthread_t thread;
    if (level < MPI_THREAD_SERIALIZED)
        CHECK(pthread_create(&thread, NULL, open_elsewhere, &level) == 0 && pthread_join(thread, NULL) == 0);
}

/* The program forgets a communicator: from then on it is broken and says why, and destroying it is safe. */
static void finalize_early(ra_comm *comm) {
    int all[64];
    MPI_Finalize();
    CHECK(ra_comm_allgather(comm, &world_rank, all, sizeof world_rank) == RA_PEER_LOST);
    CHECK(strstr(ra_last_error(), "MPI was finalized while a communicator was in use"));
    CHECK(ra_comm_allgather(comm, &world_rank, all, sizeof world_rank) == RA_PEER_LOST);
    ra_comm_destroy(comm);
}

static int level_of(const char *name) {
    static const char *const names[] = {"single", "funneled", "serialized", "multiple"};
    static const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) return levels[i];
    return -1;
}

int main(int argc, char **argv) {
    int wanted = argc > 1 ? level_of(argv[1]) : -1, level, ranks;
    bool early = argc > 2 && strcmp(argv[2], "early") == 0;
    MPI_Init_thread(&argc, &argv, wanted, &level);
    CHECK(level >= wanted);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const int many = wanted == MPI_THREAD_MULTIPLE && !early ? 66 : 3; /* more than one duplicate, and all are freed */
    for (int round = 0; round < 3; round++) {
        MPI_Comm part;
        MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &part);
        for (int opening = 0; opening < (round == 1 ? many : 3); opening++) {
            ra_comm *comm;
            CHECK(ra_comm_mpi(part, &comm) == RA_OK);
            CHECK(strcmp(ra_comm_transport(comm), "mpi") == 0 && ra_comm_rank(comm) == world_rank / 2);
            int sum = 0;
            MPI_Allreduce(&world_rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
            CHECK(sum == ranks * (ranks - 1) / 2);
            mean_of_positions(comm);
            MPI_Barrier(part);
            mean_of_positions(comm);
            ra_comm_destroy(comm);
        }
        MPI_Comm_free(&part);
    }
    wrong_communicators(level);
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    ra_comm *comm = NULL, *second = NULL; /* two at once, on a communicator and on its copy */
    CHECK(ra_comm_mpi(MPI_COMM_WORLD, &comm) == RA_OK && ra_comm_mpi(copy, &second) == RA_OK);
    mean_of_positions(comm);
    mean_of_positions(second);
    ra_comm_destroy(second);
    MPI_Comm_free(&copy);
    mean_of_positions(comm);
    if (!early) ra_comm_destroy(comm);
    if (early) finalize_early(comm);
    else MPI_Finalize();
    CHECK(ra_comm_mpi_world(1, &comm) == RA_NOT_AVAILABLE);
    printf("rank %d is through\n", world_rank);
    return 0;
}
