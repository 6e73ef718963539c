//! Command lines.

use super::*;

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

pub(super) fn args(line: &str) -> Result<Args, clap::Error> {
    without_kernel(&format!("vmlinuz {line}"))
}

pub(super) fn without_kernel(line: &str) -> Result<Args, clap::Error> {
    let words = std::iter::once("boot").chain(line.split_whitespace());
    <Line as clap::Parser>::try_parse_from(words).map(|line| line.args)
}

// An emulated host gets the options as they were given here.
#[test]
fn tracers_are_lists_of_globs() {
    let args = args("--tracer fs=vfs_*,!vfs_read --tracer tcp_*").unwrap();
    let tracers: Vec<_> = args.tracer.iter().map(ToString::to_string).collect();
    assert_eq!(tracers, ["fs=vfs_*,!vfs_read", "tcp_*"]);
    for bad in ["", "a,", ",a", "a,,b", "a b", "a:b"] {
        assert!(parse::tracer(bad).is_err(), "{bad:?}");
    }
}

// A file gets the stream itself, whatever it is to look like.
#[test]
fn forms_are_for_what_is_printed() {
    assert_eq!(args("-o file").unwrap().format(), FormatArg::Text);
    assert_eq!(args("--format graph").unwrap().format(), FormatArg::Graph);
    assert_eq!(args("--graph").unwrap().format(), FormatArg::Graph);
    assert_eq!(args("--tracer a --tracer b:graph").unwrap().format(), FormatArg::Graph);
    assert_eq!(args("--graph --min-duration 1ms").unwrap().format(), FormatArg::Graph);
    assert_eq!(args("--graph --format json").unwrap().format(), FormatArg::Json);
    assert!(args("-o file --format json").is_err());
}

#[test]
fn files_are_compressed_and_nothing_else() {
    for good in ["-o t --compress zstd", "-o t --compress zstd:3", "-o t --compress=zstd:-7"] {
        assert!(args(good).unwrap().compress.is_some(), "{good}");
    }
    for bad in ["--compress zstd", "-o t --compress lz4", "-o t --compress zstd:99"] {
        assert_eq!(args(bad).unwrap_err().exit_code(), 2, "{bad}");
    }
}

// The trace of a report is not printed, so that only its own forms are.
#[test]
fn a_boot_report_is_text_or_json() {
    for line in ["--boot-report", "--boot-report --format json", "--boot-report -o trace"] {
        assert!(args(line).unwrap().traces_boot(), "{line}");
    }
    assert!(!args("--graph").unwrap().traces_boot());
    let error = run(args("--boot-report --format graph").unwrap()).unwrap_err();
    assert!(error.is::<crate::cli::BadUsage>(), "{error}");
}

// Interrupts are limited: a guest would come up without some.
#[test]
fn more_disks_and_shares_than_there_can_be_are_one_error() {
    let check = |disks: usize, shares: usize| {
        let line = "--disk x ".repeat(disks) + &"--share / ".repeat(shares);
        args(&line).unwrap().check_devices().map_err(|error| error.to_string())
    };
    for (disks, shares) in [(MAX_DISKS, 0), (0, MAX_DISKS), (9, MAX_DISKS - 9)] {
        assert_eq!(check(disks, shares), Ok(()));
    }
    for (disks, shares) in [(MAX_DISKS + 1, 0), (0, MAX_DISKS + 1), (MAX_DISKS, 1)] {
        let error = check(disks, shares).unwrap_err();
        assert!(error.contains("16 disks and shares at most, not 17"), "{error}");
    }
}

// An emulated host would boot first, or be given memory that has wrapped around.
#[test]
fn memory_that_no_machine_has_is_a_usage_error() {
    for good in ["64M", "67108864", "1G", "1024G"] {
        assert!(args(&format!("--memory {good}")).is_ok(), "{good}");
    }
    for bad in ["0", "1", "63M", "1025G", "67108865", "18446744073709551615"] {
        let error = args(&format!("--memory {bad}")).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{bad}");
    }
}
// Whoever is in a debugger of the kernel has interrupts off for as long as it takes.
#[test]
fn a_guest_hangs_after_a_minute_unless_somebody_talks_to_it() {
    let after = |line| args(line).unwrap().hang_after().map(|time| time.as_secs());
    assert_eq!((after(""), after("--interactive -o t")), (Some(60), None));
    assert_eq!((after("--hang-after 5"), after("--hang-after 0")), (Some(5), None));
    assert_eq!(after("--interactive -o t --hang-after 5"), Some(5));
}
