//! Finds the start of init.

/// The function that starts init (init/main.c).
pub(crate) const STARTS_INIT: &str = "run_init_process";

/// Whether a line of the console says that init is started (init/main.c, `run_init_process`).
pub(crate) fn says_init(line: &str) -> bool {
    line.find("Run /")
        .is_some_and(|at| line.get(at..).is_some_and(|it| it.contains(" as init process")))
}
