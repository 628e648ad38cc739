/* A machine for predictions: how fast a rank computes, and what a message costs. */
#ifndef CLI_MACHINE_H
#define CLI_MACHINE_H

#include "ringattn.h"

typedef struct machine_link {
    double seconds;          /* of a message however short (alpha) */
    double bytes_per_second; /* (1/beta) */
} machine_link;

typedef struct machine {
    char name[64];
    const char *basis;     /* where the numbers come from */
    double flops[4];       /* useful flop/s of a rank, forward, by ra_dtype; 0: it has none of this type */
    double backward_share; /* speed of backward against forward */
    double wide_share[2];  /* speed at D > 64 against D <= 64, forward and backward */
    double visit_keys[2];  /* a visit of a query row costs as much as so many keys, forward and backward; */
    double state_keys[2];  /* so many more where it has a running state, not meeting all keys at once; */
    double end_keys[2];    /* and so many once, since the state begins and ends */
    double row_seconds[2]; /* of every row, all heads: what kernels do to rows before and after they meet keys */
    int64_t ranks_per_node;
    machine_link inside, between; /* nodes */
    double host_bytes_per_second; /* between a device and its host's memory; 0: not known */
    bool shared;                  /* all ranks compute on one device */
} machine;

/* A preset or a JSON file. RA_INVALID: neither; RA_IO: the file is wrong. */
ra_status machine_find(const char *name, machine *m);
/* RA_NOT_AVAILABLE if the machine has no rate for what is described. */
ra_status machine_suits(const machine *m, const ra_attention_desc *desc);

/* The presets, separated by spaces. */
const char *machine_names(void);

typedef struct machine_prediction {
    double forward, backward; /* seconds of the slowest rank, whose exchange runs beside its computing */
    double pairs;             /* of a rank, on average */
} machine_prediction;
ra_status machine_predict(const machine *m, const ra_attention_desc *desc, int ranks, machine_prediction *prediction);
/* The same where the summaries of all ranks are known already. */
void machine_predict_from(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *all,
                          machine_prediction *prediction);
/* One rank, with a device of its own; NaN if it has too many pairs to count. */
double machine_rank_seconds(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                            bool backward);

typedef struct machine_scaling {
    int ranks;
    int64_t seq;
    double seconds;    /* NaN: unknown, of too many pairs or too long a sequence */
    double efficiency; /* pairs a second and rank, against one rank alone; NaN: unknown */
} machine_scaling;
/* From 1 to 1024 ranks in powers of two (11 rows). Strong: the sequence of desc; weak: `share` tokens for each rank. */
#define MACHINE_SCALING_ROWS 11
ra_status machine_scale(const machine *m, const ra_attention_desc *desc, bool forward, bool backward, int64_t weak_share,
                        machine_scaling *rows);

#endif
