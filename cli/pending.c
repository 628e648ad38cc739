#include "cli.h"
#include "core/status.h"

static ra_status pending(const settings *s) {
    return ra_fail(RA_NOT_AVAILABLE, "%s is not available in this build", commands[s->command].name);
}

ra_status command_why(const settings *s, bool *check_failed) {
    (void)check_failed;
    return pending(s);
}
ra_status command_draw(const settings *s, bool *check_failed) {
    (void)check_failed;
    return pending(s);
}
ra_status command_demo(const settings *s, bool *check_failed) {
    (void)check_failed;
    return pending(s);
}
