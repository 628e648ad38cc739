#include "help.h"

#include <string.h>

#include "cli.h"
#include "core/status.h"
#include "machine.h"

#define INDENT 30
#define COLUMNS 110

static const struct {
    option_id first;
    const char *title;
} groups[] = {
    {OPT_Q, "Options of this command"},
    {OPT_BATCH, "Shape of the generated data"},
    {OPT_SEGMENT_LENGTHS, "What is computed"},
    {OPT_RING_SIZE, "How it is computed"},
    {OPT_JSON, "Output"},
};
enum { GROUP_COUNT = sizeof groups / sizeof *groups };

static bool visible(command c) { return c != CMD_COMPLETION && c != CMD_MAN; }

void help_overview(FILE *to) {
    fprintf(to, "ringattn %s: exact ring attention with dilation, for very long sequences\n\n", ra_version());
    fprintf(to, "usage: ringattn COMMAND [OPTION...]\n\n");
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (visible((command)c)) fprintf(to, "  %-12s %s\n", commands[c].name, commands[c].help);
    fprintf(to, "\n  %-12s %s\n  %-12s %s\n", commands[CMD_COMPLETION].name, commands[CMD_COMPLETION].help,
            commands[CMD_MAN].name, commands[CMD_MAN].help);
    fprintf(to, "\nringattn help COMMAND lists the options of a command; ringattn --version prints the version.\n");
    fprintf(to,
            "Exit: 0 done, 1 a check failed, 2 usage, 3 file, 4 memory, 5 communication, 6 not available here, 70 internal.\n");
}

/* Prints words from column INDENT on, broken at COLUMNS. */
static void wrapped(int used, const char *text) {
    int column = used;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column < INDENT) column += printf("%*s", INDENT - column, "");
        if (column + length > COLUMNS && column > INDENT) {
            printf("\n%*s", INDENT, "");
            column = INDENT;
        }
        column += printf("%.*s", length, text);
        text += length;
        if (*text == ' ') {
            column += printf(" ");
            text++;
        }
    }
    printf("\n");
}

static void help_option(const option *o) {
    char text[512];
    snprintf(text, sizeof text, "%s%s%s%s", o->help, o->otherwise[0] ? " (default " : "", o->otherwise,
             o->otherwise[0] ? ")" : "");
    int used = printf("  --%s%s%s", o->name, o->value[0] ? " " : "", o->value);
    if (used >= INDENT - 1) {
        printf("\n");
        used = 0;
    }
    wrapped(used, text);
}

void help_command(command c) {
    printf("usage: ringattn %s %s\n\n%s\n", commands[c].name, commands[c].usage, commands[c].help);
    for (int g = 0; g < GROUP_COUNT; g++) {
        int end = g + 1 < GROUP_COUNT ? (int)groups[g + 1].first : OPTION_COUNT;
        bool titled = false;
        for (int id = (int)groups[g].first; id < end; id++) {
            if (!option_listed((option_id)id, c)) continue;
            if (!titled) printf("\n%s:\n", groups[g].title);
            titled = true;
            help_option(&options[id]);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- completions */

static void print_words(const char *choices) {
    for (; *choices; choices++) putchar(*choices == '|' ? ' ' : *choices);
}

static void completion_bash(void) {
    printf("# bash completion for ringattn; source it, or install it as bash-completion/completions/ringattn\n"
           "_ringattn() {\n"
           "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} options\n"
           "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n        COMPREPLY=($(compgen -W \"");
    for (int c = 0; c < COMMAND_COUNT; c++) printf("%s ", commands[c].name);
    printf("help --help --version\" -- \"$current\"))\n        return\n    fi\n    case $previous in\n");
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (options[id].kind == KIND_FLAG) continue;
        printf("    --%s) ", options[id].name);
        if (options[id].kind == KIND_CHOICE) {
            printf("COMPREPLY=($(compgen -W \"");
            print_words(options[id].value);
            printf("\" -- \"$current\"))");
        } else if (id == OPT_MACHINE) printf("COMPREPLY=($(compgen -f -W \"%s\" -- \"$current\"))", machine_names());
        else if (options[id].kind == KIND_FILE) printf("COMPREPLY=($(compgen -f -- \"$current\"))");
        else printf("COMPREPLY=()");
        printf("; return ;;\n");
    }
    printf("    esac\n    case ${COMP_WORDS[1]} in\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        printf("    %s) options=\"", commands[c].name);
        for (int id = 0; id < OPTION_COUNT; id++)
            if (option_listed((option_id)id, (command)c)) printf("--%s ", options[id].name);
        printf("%s\" ;;\n", c == CMD_COMPLETION ? "bash zsh" : "");
    }
    printf("    esac\n    COMPREPLY=($(compgen -W \"$options\" -- \"$current\"))\n}\ncomplete -o filenames -F _ringattn "
           "ringattn\n");
}

/* Text inside a zsh specification: brackets, colons and quotes have meanings there. */
static void print_quoted(const char *text) {
    for (; *text; text++) {
        if (*text == '[' || *text == ']' || *text == ':') putchar('\\');
        if (*text == '\'') fputs("'\\'", stdout);
        putchar(*text);
    }
}

static void completion_zsh(void) {
    printf("#compdef ringattn\n# zsh completion for ringattn; install it as _ringattn in a directory of $fpath\n_ringattn() {\n"
           "    local -a commands\n    commands=(\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        printf("        '%s:", commands[c].name);
        print_quoted(commands[c].help);
        printf("'\n");
    }
    printf("    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n    case "
           "$words[2] in\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        printf("    %s)\n        _arguments '1:command:'", commands[c].name);
        if (c == CMD_COMPLETION) printf(" '2:shell:(bash zsh)'");
        for (int id = 0; id < OPTION_COUNT; id++) {
            if (!option_listed((option_id)id, (command)c)) continue;
            printf(" \\\n            '--%s%s[", options[id].name, options[id].kind == KIND_FLAG ? "" : "=");
            print_quoted(options[id].help);
            printf("]");
            if (options[id].kind == KIND_CHOICE) {
                printf(":%s:(", options[id].name);
                print_words(options[id].value);
                printf(")");
            } else if (id == OPT_MACHINE) printf(":machine:{_values machine %s; _files}", machine_names());
            else if (options[id].kind == KIND_FILE) printf(":%s:_files", options[id].name);
            else if (options[id].kind != KIND_FLAG) printf(":%s:", options[id].name);
            printf("'");
        }
        printf("\n        ;;\n");
    }
    printf("    esac\n}\n_ringattn \"$@\"\n");
}

ra_status command_completion(const settings *s, bool *check_failed) {
    (void)check_failed;
    if (s->subject && strcmp(s->subject, "bash") == 0) completion_bash();
    else if (s->subject && strcmp(s->subject, "zsh") == 0) completion_zsh();
    else return ra_fail(RA_INVALID, "completion needs the shell: bash or zsh");
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------------- manual page */

/* troff text: a leading dot or quote would be a request, a backslash and a minus have meanings. */
static void print_troff(const char *text) {
    if (*text == '.' || *text == '\'') fputs("\\&", stdout);
    for (; *text; text++) {
        if (*text == '\\') fputs("\\e", stdout);
        else if (*text == '-') fputs("\\-", stdout);
        else putchar(*text);
    }
}

static void man_option(const option *o) {
    printf(".TP\n.B \"\\-\\-");
    print_troff(o->name);
    if (o->value[0]) {
        putchar(' ');
        print_troff(o->value);
    }
    printf("\"\n");
    print_troff(o->help);
    if (o->otherwise[0]) {
        printf(" (default ");
        print_troff(o->otherwise);
        printf(")");
    }
    printf(".\n");
    /* which commands take it, where that says something */
    unsigned shared = options[OPT_RING_SIZE].commands;
    if ((o->commands & shared) == shared) return;
    printf("(");
    for (int c = 0, n = 0; c < COMMAND_COUNT; c++)
        if (visible((command)c) && (o->commands >> c & 1u)) printf("%s%s", n++ ? ", " : "", commands[c].name);
    printf(")\n");
}

ra_status command_man(const settings *s, bool *check_failed) {
    (void)s;
    (void)check_failed;
    printf(".TH RINGATTN 1 \"\" \"ringattn %s\" \"User Commands\"\n.SH NAME\nringattn \\- exact ring attention with dilation\n",
           ra_version());
    printf(".SH SYNOPSIS\n.B ringattn\n.I COMMAND\n[\\fIOPTION\\fR...]\n.SH DESCRIPTION\n"
           "Computes exact attention, forward and backward, of sequences that are dealt to a ring of ranks: threads of one "
           "process, or the "
           "processes of a launcher. Dense, dilated, causal and windowed patterns are defined on global positions; the number "
           "of ranks "
           "never changes which function is computed.\n.SH COMMANDS\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        printf(".TP\n.B \"%s ", commands[c].name);
        print_troff(commands[c].usage);
        printf("\"\n");
        print_troff(commands[c].help);
        printf(".\n");
    }
    printf(".SH OPTIONS\nA value follows its option as the next word or after an equals sign.\n");
    for (int g = 0; g < GROUP_COUNT; g++) {
        int end = g + 1 < GROUP_COUNT ? (int)groups[g + 1].first : OPTION_COUNT;
        printf(".SS %s\n", g == 0 ? "Of one command" : groups[g].title);
        for (int id = (int)groups[g].first; id < end; id++)
            if (options[id].unlisted != options[id].commands) man_option(&options[id]);
    }
    printf(".SH EXIT STATUS\n"
           ".TP\n.B 0\nDone.\n.TP\n.B 1\nA check failed (verify, demo, bench \\-\\-rank).\n.TP\n.B 2\nUsage: wrong whatever "
           "the files hold.\n"
           ".TP\n.B 3\nA file cannot be read or written or is malformed, or shapes or options do not fit it.\n"
           ".TP\n.B 4\nOut of memory, or over \\-\\-memory\\-limit.\n"
           ".TP\n.B 5\nCommunication: a peer was lost or timed out, or ranks disagree on the configuration.\n"
           ".TP\n.B 6\nNot available here.\n.TP\n.B 70\nInternal error, or a call of the GPU failed.\n"
           ".TP\n.B 129, 130, 131, 143, 152\nEnded by a hang-up, an interrupt, a quit, a request, or a limit of processor "
           "time.\n"
           ".SH ENVIRONMENT\n.TP\n.B RINGATTN_KERNEL\nKernel family when \\-\\-kernel is not given.\n"
           ".TP\n.B RINGATTN_MPI\nopenmpi or mpich; overrides the launcher's variables.\n"
           ".TP\n.B RINGATTN_MODULE_PATH\nDirectory of the modules for MPI and CUDA.\n"
           ".TP\n.B RINGATTN_LANE\nstaged: messages between GPUs go through pinned memory of the host, always. nccl: between "
           "processes they go by NCCL, or the command fails.\n"
           ".TP\n.B RINGATTN_NCCL\nThe libnccl.so.2 to load, if not the one that the system finds.\n"
           ".TP\n.B RINGATTN_LANE_RATE\nGigabytes a second: what arrives at a GPU is held back as if by a slower network.\n"
           ".TP\n.B RINGATTN_DEBUG\nnone, warn (the default), info or trace: what happens, on standard error.\n"
           ".TP\n.B NO_COLOR\nNo colours, if set.\n"
           ".SH SEE ALSO\n.BR ringattn (3)\n");
    return RA_OK;
}
