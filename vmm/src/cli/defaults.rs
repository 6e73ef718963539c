//! The defaults of options, which `--help` and the manual pages show at the end of each option's help. A test checks
//! that every option has one.

use clap::{Arg, Command};

const EVERY_FUNCTION: &str = "every function";
const ALL_RECORDS: &str = "records of all tracers";

/// Defaults by subcommand, empty for all that have the option, and by the option's long name.
const DEFAULTS: &[(&str, &str, &str)] = &[
    ("", "comm", "all tasks"),
    ("", "cpu", "all vCPUs"),
    ("", "filter", EVERY_FUNCTION),
    ("", "follow", "all tasks"),
    ("", "graph", "--format decides"),
    ("", "graph-root", "all calls"),
    ("", "json", "text"),
    ("", "limit", "all"),
    ("", "max-depth", "calls of any depth"),
    ("", "min-duration", "returns of all calls"),
    ("", "module", "functions of the kernel and of all modules"),
    ("", "no-pager", "$VMTRACE_PAGER, $PAGER or less"),
    ("", "notrace", "no exceptions"),
    ("", "over", "none are listed"),
    ("", "pid", "all processes"),
    ("", "since", "from the beginning"),
    ("", "system-map", "the symbols in the image"),
    ("", "tracer", ALL_RECORDS),
    ("", "until", "to the end"),
    // Rules.
    ("", "budget", "no such rule"),
    ("", "expect", "no such rule"),
    ("", "forbid", "no such rule"),
    ("", "max", "no such rule"),
    ("", "order", "no such rule"),
    ("", "rules", "only the rules of the command line"),
    ("", "within", "no such rule"),
    ("boot", "add", "no other files"),
    ("boot", "arg", "no values"),
    ("boot", "args", "no parameters but those of --arg"),
    ("boot", "boot-report", "no report"),
    (
        "boot",
        "buffer",
        "what fits beside the trace's code: 12M for one vCPU, 6M for each of two, and so on",
    ),
    ("boot", "children", "only the tasks that --pid and --comm name"),
    ("boot", "compress", "not compressed"),
    ("boot", "context", "not recorded, except with --latency"),
    ("boot", "count", "calls are recorded"),
    ("boot", "count-callers", "no calls are counted by caller"),
    ("boot", "disk", "no disks"),
    ("boot", "end-at", "the run ends with the guest, --run or --timeout"),
    ("boot", "event", "no events, except those of --boot-report and --latency"),
    ("boot", "exec-at", "no commands"),
    ("boot", "exits", "no exits"),
    (
        "boot",
        "filter",
        "every function; none if there is --tracer, --hist, --count-callers, --event, --exits, --boot-report or --latency",
    ),
    ("boot", "format", "text; graph if returns are traced"),
    ("boot", "from", "right after the kernel's ftrace_init"),
    ("boot", "graph", "entries only"),
    ("boot", "hist", "no histograms"),
    ("boot", "if", "all calls"),
    ("boot", "init", "the agent"),
    ("boot", "initrd", "the built-in initramfs, with the agent as process 1"),
    (
        "boot",
        "interactive",
        "the console is standard error, and standard input is its input: see --console",
    ),
    ("boot", "kaslr", "the addresses of the image"),
    ("boot", "latency", "no report"),
    ("boot", "mark-at", "no marks of calls"),
    (
        "boot",
        "modules",
        "auto if no KERNEL is named; else only what --disk, --share, --root and the output of --run need, where auto finds it",
    ),
    ("boot", "no-console-marks", "each line is a mark"),
    ("boot", "no-seccomp", "the process is confined"),
    ("boot", "output", "printed to standard output, as --format says"),
    ("boot", "returns", "only functions whose returns are traced from the beginning"),
    ("boot", "retval", "not recorded"),
    ("boot", "root", "the root is the initramfs"),
    (
        "boot",
        "run",
        "--initrd starts its own /init and --root a shell on the console; the built-in initramfs waits for `vmtrace run`, or \
         powers off if the guest has no vsock",
    ),
    ("boot", "serve-guest", "nobody in the guest; `--serve-guest` alone means privileged"),
    ("boot", "share", "no shares"),
    ("boot", "snapshot-at", "only at the end"),
    ("boot", "socket", "no socket"),
    ("boot", "start-at", "recording starts at once"),
    ("boot", "stop-at", "recording stops at the end"),
    ("boot", "timeout", "no limit"),
    ("boot", "tracer", "only that of -f"),
    ("boot", "vsock", "no socket"),
    ("convert", "compress", "not compressed"),
    ("convert", "notrace", "no exceptions"),
    ("doctor", "boot", "only checks that need no emulated host"),
    ("events", "count", "a list"),
    ("events", "json", "a line for each"),
    ("events", "modules", "only those of the kernel"),
    ("functions", "count", "a list"),
    ("functions", "modules", "only those of the kernel"),
    ("report", "boot", "the records"),
    ("report", "callers", "the records"),
    ("report", "latency", "the records"),
    ("report", "stats", "the records"),
    ("report", "summary", "the records, then the summary"),
    ("report", "top", "the records"),
    ("run", "command-line", "CMD is run as it is, without a shell"),
    ("run", "cwd", "that of the agent"),
    ("run", "env", "only the agent's environment"),
    ("run", "fetch", "a command is run"),
    ("run", "list", "a command is run"),
    ("run", "modules", "a command is run"),
    ("run", "output", "standard output"),
    ("run", "vsock", "autodetected"),
    ("setup", "list", "they are fetched"),
    ("setup", "quiet", "progress is shown"),
    ("setup", "refresh", "fetched versions are kept"),
    ("stream", "output", "standard output"),
    ("table", "by-cpu", "sums of all vCPUs"),
    ("table", "every", "one table"),
];

fn default(command: &str, option: &str) -> Option<&'static str> {
    let find =
        |of: &str| DEFAULTS.iter().find(|(command, name, _)| (*command, *name) == (of, option));
    find(command).or_else(|| find("")).map(|(_, _, default)| *default)
}

/// Whether its help says it already: clap does for values, and some values need more words.
fn is_said(argument: &Arg) -> bool {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string);
    !argument.get_default_values().is_empty() && argument.get_action().takes_values()
        || help.is_some_and(|help| help.contains("[default: "))
}

/// The same command with what happens without its options.
pub(super) fn add(command: Command) -> Command {
    let name = command.get_name().to_owned();
    let add_to = |argument: Arg| {
        let default = argument.get_long().and_then(|long| default(&name, long));
        let Some(default) = default.filter(|_| !is_said(&argument)) else {
            return argument;
        };
        let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string);
        argument.long_help(format!("{}\n\nDefault: {default}", help.unwrap_or_default()))
    };
    command.mut_args(add_to).mut_subcommands(add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    /// Options that are shown and may be left out, with their commands, and whether their help says what happens then.
    fn options(command: &Command) -> Vec<(String, String, bool)> {
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        let own = shown.filter(|argument| !argument.is_required_set()).filter_map(|argument| {
            let (of, name) = (command.get_name().to_owned(), argument.get_long()?.to_owned());
            Some((of, name, is_said(argument)))
        });
        let below = command.get_subcommands().filter(|command| !command.is_hide_set());
        own.chain(below.flat_map(options)).collect()
    }

    #[test]
    fn every_option_says_what_happens_without_it() {
        let options = options(&Cli::command());
        assert!(options.len() > 130, "{options:?}");
        let missing = options
            .iter()
            .filter(|(command, option, is_said)| !is_said && default(command, option).is_none());
        let missing: Vec<_> = missing.collect();
        assert!(missing.is_empty(), "{missing:#?}");
        // And nothing here is said of an option that is no more, or that says it itself.
        for (command, option, _) in DEFAULTS {
            let used = options.iter().any(|(of, name, is_said)| {
                let own = DEFAULTS.iter().any(|(command, name, _)| command == of && name == option);
                let applies = command == of || command.is_empty() && !own;
                applies && option == name && !is_said
            });
            assert!(used, "{command} --{option}");
        }
    }

    #[test]
    fn defaults_are_in_the_help() {
        let mut command = add(Cli::command());
        command.build();
        let help = |command: &mut Command| command.render_long_help().to_string();
        let boot = command.find_subcommand_mut("boot").unwrap();
        assert!(help(boot).contains("Default: no limit"), "{}", help(boot));
        assert!(help(boot).contains("[default: 512M]"), "{}", help(boot));
        assert!(!boot.render_help().to_string().contains("Default: "), "a summary");
        let diff = command.find_subcommand_mut("diff").unwrap();
        assert!(help(diff).contains("Default: every function"), "{}", help(diff));
    }
}
