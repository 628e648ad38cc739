/* ringattn: the command line. Parses, dispatches, and turns a status into an exit code and one sentence. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"
#include "group.h"
#include "help.h"
#include "io/output.h"
#include "trace.h"

static const command_function functions[COMMAND_COUNT] = {
    [CMD_RUN] = command_run,
    [CMD_GRAD] = command_run,
    [CMD_VERIFY] = command_verify,
    [CMD_BENCH] = command_bench,
    [CMD_MEMORY] = command_memory,
    [CMD_PLAN] = command_plan,
    [CMD_WHY] = command_why,
    [CMD_DRAW] = command_draw,
    [CMD_INFO] = command_info,
    [CMD_DEMO] = command_demo,
    [CMD_COMPLETION] = command_completion,
    [CMD_MAN] = command_man,
};

static int exit_code(ra_status status) {
    switch (status) {
    case RA_OK: return EXIT_DONE;
    case RA_INVALID: return EXIT_USAGE;
    case RA_IO: return EXIT_FILE;
    case RA_NOMEM: return EXIT_MEMORY;
    case RA_PEER_LOST:
    case RA_TIMEOUT:
    case RA_DISAGREE:
    case RA_PROTOCOL:
    case RA_ABORTED: return EXIT_COMMUNICATION;
    case RA_NOT_AVAILABLE: return EXIT_NOT_AVAILABLE;
    case RA_DEVICE:
    case RA_INTERNAL: return EXIT_INTERNAL;
    }
    return EXIT_INTERNAL;
}

/* Ends the process at once, as a signal asks; only what is safe in a handler. */
static void on_signal(int number) {
    ra_output_discard_all();
    if (number == SIGBUS) {
        static const char sentence[] = "ringattn: a mapped file became shorter, or its disk failed, while it was used\n";
        ssize_t ignored = write(STDERR_FILENO, sentence, sizeof sentence - 1);
        (void)ignored;
        _exit(EXIT_FILE);
    }
    if (number != SIGQUIT) _exit(128 + number);
    signal(SIGQUIT, SIG_DFL); /* whoever asks so may want a dump of the core */
    raise(SIGQUIT);           /* comes when this returns */
}

/* What a parent ignores (nohup) stays ignored. */
static void handle(int number, const struct sigaction *action) {
    struct sigaction inherited;
    if (sigaction(number, NULL, &inherited) == 0 && inherited.sa_handler == SIG_IGN) return;
    sigaction(number, action, NULL);
}

static void set_signals(void) {
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset(&action.sa_mask);
    handle(SIGINT, &action);
    handle(SIGTERM, &action);
    handle(SIGHUP, &action);
    handle(SIGQUIT, &action);
    handle(SIGXCPU, &action);
    sigaction(SIGBUS, &action, NULL);
    action.sa_handler = SIG_IGN; /* both signals show as errors of a write */
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL);
}

/* Where a parent closed one of the first three descriptors, the next file that is opened would get its number, and messages
 * would go into that file. So /dev/null takes its place, opened in the wrong direction: using it stays an error. */
static bool take_descriptors(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) return false;
    return true;
}

static bool is(const char *word, const char *one, const char *other) {
    return strcmp(word, one) == 0 || strcmp(word, other) == 0;
}

/* help, or help COMMAND. */
static ra_status help(int argc, char **argv) {
    command c;
    if (argc > 3) return ra_fail(RA_INVALID, "help takes one command, as in ringattn help plan");
    if (argc == 2) help_overview(stdout);
    else RA_TRY(options_command(argv[2], &c));
    if (argc == 3) help_command(c);
    return RA_OK;
}

/* What explains a job without running it counts the processes of its launcher. */
static void take_ring_size(settings *s) {
    const bool explains = s->command == CMD_PLAN || s->command == CMD_WHY || s->command == CMD_DRAW;
    if (explains && !s->given[OPT_RING_SIZE] && group_launched(s)) s->ring_size = ra_max(1, group_launcher_ranks());
}

static ra_status execute(int argc, char **argv, settings *s, bool *check_failed) {
    RA_TRY(options_parse(argc - 1, argv + 1, s));
    if (s->help) {
        help_command(s->command);
        return RA_OK;
    }
    take_ring_size(s);
    RA_TRY(settings_check(s));
    bool collective = s->command == CMD_RUN || s->command == CMD_GRAD || s->command == CMD_VERIFY ||
                      (s->command == CMD_BENCH && s->rank < 0);
    if (!collective && group_follows(s)) return RA_OK; /* rank 0 does it */
    RA_TRY(functions[s->command](s, check_failed));
    return trace_write(s, group_world());
}

int main(int argc, char **argv) {
    static settings s;
    if (!take_descriptors()) return EXIT_FILE; /* no /dev/null, and nowhere to say so */
    set_signals();
    json_watch();
    ra_status status = RA_OK;
    bool check_failed = false;
    if (argc == 2 && is(argv[1], "--help", "-h")) help_overview(stdout);
    else if (argc >= 2 && strcmp(argv[1], "help") == 0) status = help(argc, argv);
    else if (argc == 2 && is(argv[1], "--version", "-V")) printf("ringattn %s\n", ra_version());
    else if (argc < 2) {
        help_overview(stderr);
        return EXIT_USAGE;
    } else status = execute(argc, argv, &s, &check_failed);
    bool written = fflush(stdout) == 0 && !ferror(stdout);
    if (!written && status == RA_OK) status = ra_fail(RA_IO, "standard output cannot be written");
    if (status != RA_OK) {
        /* A mistake of the user is found by all ranks of a job, and rank 0 reports it. Failures of communication every rank
         * reports. */
        bool echo = group_follows(&s) && exit_code(status) != EXIT_COMMUNICATION;
        if (!echo) fprintf(stderr, "ringattn: %s\n", ra_last_error());
        group_end(status, exit_code(status), echo);
        return exit_code(status);
    }
    group_end(RA_OK, 0, false);
    return check_failed ? EXIT_CHECK_FAILED : EXIT_DONE;
}
