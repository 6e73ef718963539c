//! An example of every option that takes a value, which `--help` and the manual pages show at the end of the option's
//! help. A test parses them all.

use clap::{Arg, Command};

/// Examples by subcommand, empty for all that have the option, and by the option's long name.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("", "comm", "--comm 'ssh*'"),
    ("", "cpu", "--cpu 0,2"),
    ("", "filter", "--filter 'vfs_*'"),
    ("", "follow", "--follow sshd"),
    ("", "graph-root", "--graph-root ksys_read"),
    ("", "limit", "--limit 100"),
    ("", "max-depth", "--max-depth 3"),
    ("", "min-duration", "--min-duration 10us"),
    ("", "module", "--module ext4"),
    ("", "notrace", "--notrace '*lock*'"),
    ("", "over", "--over 500us"),
    ("", "pid", "--pid 1"),
    ("", "since", "--since 1.204530"),
    ("", "system-map", "--system-map System.map"),
    ("", "tracer", "--tracer fs"),
    ("", "until", "--until 1500ms"),
    ("", "wait", "--wait 60"),
    ("", "budget", "--budget 'boot 20s'"),
    ("", "expect", "--expect 'vfs_open >= 1'"),
    ("", "forbid", "--forbid 'panic|oops_*'"),
    ("", "max", "--max 'vfs_read 5ms'"),
    ("", "order", "--order 'vfs_open < vfs_read'"),
    ("", "results", "--results junit=results.xml"),
    ("", "rules", "--rules rules.txt"),
    ("", "within", "--within 'do_sys_openat2 -> vfs_open 5ms'"),
    ("boot", "add", "--add ./my-test"),
    ("boot", "arg", "--arg 'vfs_read: file->f_path.dentry->d_name.name, count'"),
    ("boot", "buffer", "--buffer 64M"),
    ("boot", "cid", "--cid 7"),
    ("boot", "cmdline", "--cmdline 'quiet root=/dev/vda'"),
    ("boot", "comm", "--comm sshd --children"),
    ("boot", "compress", "-o trace.vmt --compress zstd:3"),
    ("boot", "console", "--console none"),
    ("boot", "count-callers", "--count-callers 'vfs_read if pid == 42'"),
    ("boot", "cpus", "--cpus 4"),
    ("boot", "disk", "--disk root.img,rw --disk data.img"),
    ("boot", "end-at", "--end-at 'vfs_fsync:10'"),
    ("boot", "end-code", "--end-at panic --end-code 9"),
    ("boot", "event", "--event 'sched:sched_process_*'"),
    ("boot", "exec-at", "--exec-at '__ext4_error -- echo \"$VMTRACE_FUNCTION\" >>log'"),
    ("boot", "filter", "-f 'vfs_*' -f 'ext4_*:mod:ext4' -f @functions.txt"),
    ("boot", "format", "--format json"),
    ("boot", "from", "--from do_sys_openat2"),
    ("boot", "graph-root", "--graph --graph-root vfs_read"),
    ("boot", "hang-after", "--hang-after 20"),
    ("boot", "hist", "--hist 'vfs_read:count if pid == 42'"),
    ("boot", "host", "--host emulated"),
    ("boot", "if", "--if 'count > 4K && comm == \"ssh*\"'"),
    ("boot", "init", "--root / --init /sbin/init"),
    ("boot", "initrd", "--initrd initrd.img --run 'ls /'"),
    ("boot", "latency", "--latency irqsoff --over 500us"),
    ("boot", "mark-at", "--mark-at 'do_exit if comm == \"sshd\"'"),
    ("boot", "max-depth", "--graph --max-depth 3"),
    ("boot", "memory", "--memory 2G"),
    ("boot", "min-duration", "--graph --min-duration 10us"),
    ("boot", "modules", "--modules auto"),
    ("boot", "output", "-o trace.vmt"),
    ("boot", "over", "--latency osnoise --over 2ms"),
    ("boot", "overflow", "--overflow block"),
    ("boot", "returns", "--returns 'vfs_*'"),
    ("boot", "root", "--root / --run 'git status'"),
    ("boot", "run", "--run 'ls / | wc -l'"),
    ("boot", "serve-guest", "--serve-guest=all"),
    ("boot", "share", "--share src --share out,rw,tag=out"),
    ("boot", "snapshot-at", "--overflow overwrite -o trace.vmt --snapshot-at __ext4_error"),
    ("boot", "socket", "--socket vmtrace.sock"),
    ("boot", "start-at", "--start-at 'vfs_write:100 if count > 4K'"),
    ("boot", "stop-at", "--stop-at do_exit"),
    ("boot", "timeout", "--timeout 600"),
    ("boot", "tracer", "--tracer 'fs=vfs_*,!vfs_read:graph if pid == 1'"),
    ("boot", "vsock", "--vsock vsock.sock"),
    ("convert", "clock", "--clock guest"),
    ("convert", "compress", "--compress zstd:9"),
    ("convert", "format", "--format chrome"),
    ("convert", "output", "-o trace.pftrace"),
    ("diff", "format", "--format json"),
    ("diff", "least", "--least 100us"),
    ("diff", "noise", "--noise 5"),
    ("events", "modules", "--modules /lib/modules/6.12.0"),
    ("functions", "modules", "--modules /lib/modules/6.12.0"),
    ("report", "callers", "--callers vfs_open"),
    ("report", "clock", "--clock guest"),
    ("report", "color", "--color always"),
    ("report", "format", "--format json"),
    ("report", "latency", "--latency wakeup --over 1ms"),
    ("report", "over", "--latency wakeup --over 1ms"),
    ("run", "command-line", "-c 'ls / | wc -l'"),
    ("run", "cwd", "--cwd /tmp"),
    ("run", "env", "--env LANG=C"),
    ("run", "fetch", "--fetch /proc/kallsyms"),
    ("run", "list", "--list /proc"),
    ("run", "output", "--fetch /proc/kallsyms -o kallsyms"),
    ("run", "port", "--port 1025"),
    ("stream", "format", "--format stats"),
    ("stream", "output", "-o calls.txt"),
    ("table", "count", "--every 1 --count 10"),
    ("table", "every", "--every 0.5"),
    ("top", "by", "--by self"),
    ("top", "count", "--count 10"),
    ("top", "every", "--every 0.5"),
    ("top", "rows", "--rows 40"),
];

fn example(command: &str, option: &str) -> Option<&'static str> {
    let find =
        |of: &str| EXAMPLES.iter().find(|(command, name, _)| (*command, *name) == (of, option));
    find(command).or_else(|| find("")).map(|(_, _, example)| *example)
}

/// The same command with examples.
pub(super) fn add(command: Command) -> Command {
    let name = command.get_name().to_owned();
    let add_to = |argument: Arg| {
        let example = argument.get_long().and_then(|long| example(&name, long));
        let Some(example) = example.filter(|_| argument.get_action().takes_values()) else {
            return argument;
        };
        let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string);
        argument.long_help(format!("{}\n\nExample: {example}", help.unwrap_or_default()))
    };
    command.mut_args(add_to).mut_subcommands(add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::kernel::Kernel;
    use clap::CommandFactory as _;
    use vmtrace_agent::{Line, understand};

    /// What a subcommand needs besides, with `@` where an option can stand.
    const LINES: [(&str, &str); 15] = [
        ("boot", "boot vmlinuz @"),
        ("check", "check trace.vmt 'expect vfs_open' @"),
        ("convert", "convert trace.vmt @"),
        ("diff", "diff a.vmt b.vmt @"),
        ("events", "events vmlinuz @"),
        ("filter", "ctl vmtrace.sock filter @"),
        ("functions", "functions vmlinuz @"),
        ("inspect", "inspect vmlinuz @"),
        ("report", "report trace.vmt @"),
        ("run", "run vmtrace.sock @"),
        ("start", "ctl vmtrace.sock latency start irqsoff @"),
        ("stream", "stream vmtrace.sock @"),
        ("table", "ctl vmtrace.sock table @"),
        ("top", "top vmtrace.sock @"),
        ("show", "ctl vmtrace.sock latency show @"),
    ];

    /// Commands with their options that take values and are shown.
    fn options(command: &Command) -> Vec<(String, String)> {
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        let own = shown.filter(|argument| argument.get_action().takes_values());
        let own = own.filter_map(|argument| {
            Some((command.get_name().to_owned(), argument.get_long()?.to_owned()))
        });
        let below = command.get_subcommands().filter(|command| !command.is_hide_set());
        own.chain(below.flat_map(options)).collect()
    }

    // An option is found by its example, and one that is refused helps nobody.
    #[test]
    fn every_option_with_a_value_has_an_example_that_is_understood() {
        let options = options(&Cli::command());
        assert!(options.len() > 100, "{options:?}");
        let (mut missing, mut wrong) = (Vec::new(), Vec::new());
        for (command, option) in &options {
            let Some(example) = example(command, option) else {
                missing.push(format!("{command} --{option}"));
                continue;
            };
            let line = LINES.iter().find(|(name, _)| name == command);
            let (_, line) = line.unwrap_or_else(|| panic!("no line for {command}"));
            // What needs another option besides.
            let line = match (command.as_str(), option.as_str()) {
                ("convert", option) if option != "output" => line.replace('@', "-o out.json @"),
                ("run", "cwd" | "env" | "port" | "wait") => format!("{line} -- ls"),
                _ => (*line).to_owned(),
            };
            let line = format!("vmtrace {}", line.replace('@', example));
            let Ok(Line::Steps(steps)) = understand(&line.replace('$', "S"), |_| true) else {
                panic!("{line}");
            };
            let words = steps.into_iter().flat_map(|step| step.words);
            if let Err(error) = Cli::command().try_get_matches_from(words) {
                wrong.push(format!("{line}: {error}"));
            }
            let short = format!("--{option}");
            assert!(example.contains(&short) || example.starts_with('-'), "{line}");
        }
        assert!(missing.is_empty() && wrong.is_empty(), "{missing:#?} {wrong:#?}");
        // And none is of an option that is no more.
        for (command, option, _) in EXAMPLES {
            let known = options
                .iter()
                .any(|(of, name)| (command.is_empty() || command == of) && option == name);
            assert!(known, "{command} --{option}");
        }
    }

    // A macro of the kernel's sources is no function: who copies the example is refused. Needs a kernel of `scripts/setup`.
    #[test]
    fn functions_of_examples_are_in_a_kernel() {
        const BEFORE: [&str; 4] = ["-at ", "--from ", "--graph-root ", "--count-callers "];
        let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
        let kernel = Kernel::open(&cache.join("kernels/x86_64-6.12/vmlinuz")).unwrap();
        let mut names = 0;
        for (_, _, example) in EXAMPLES {
            for behind in BEFORE.iter().filter_map(|before| Some(example.split_once(before)?.1)) {
                let behind = behind.trim_start_matches('\'');
                let is_name = |char: &char| char.is_ascii_alphanumeric() || "_*".contains(*char);
                let glob: String = behind.chars().take_while(is_name).collect();
                assert!(kernel.select(&[glob], &[]).is_ok(), "{example}");
                names += 1;
            }
        }
        assert!(names > 8, "{names}");
    }

    #[test]
    fn examples_are_in_the_help() {
        let mut command = add(Cli::command());
        command.build();
        let boot = command.find_subcommand_mut("boot").unwrap();
        let help = boot.render_long_help().to_string();
        assert!(help.contains("Example: --memory 2G"), "{help}");
        assert!(!boot.render_help().to_string().contains("Example: "), "a summary");
    }
}
