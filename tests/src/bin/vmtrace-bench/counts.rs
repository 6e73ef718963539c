//! The cost of conditions, counters and histograms for a call, on both architectures, each compared with the
//! guest's own equivalent, in a separate boot. Also the cost of counting every function, for a workload and for
//! whole boots.

use crate::boots::{cost, millions};
use crate::guest::{Run, work};
use crate::{RISCV, value};
use anyhow::{Result, ensure};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, syscall};

/// Rows by what the guest's program calls them: the function, if it is not that of a system call, and what is to
/// be done there.
const ROWS: [(&str, &str, &str); 10] = [
    ("count", "getppid", ":count"),
    ("hist-duration", "getuid", ":hist"),
    ("hist-argument", "__sys_setresuid", ":hist(ruid)"),
    ("argument-fails", "__sys_setresgid", " if rgid == 12345"),
    ("argument-holds", "__sys_setfsuid", " if uid != 12345"),
    ("pid-fails", "geteuid", " if pid == 12345"),
    ("retval-fails", "getgid", " if retval < 0"),
    ("duration-fails", "gettid", " if duration > 1ms"),
    ("entry", "__sys_setfsgid", ""),
    ("callers", "sched_get_priority_max", ":callers"),
];

/// The table.
pub(crate) fn run() -> Result<()> {
    println!("\ninstructions a call that is counted, sorted or decided on");
    table(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| table(&RISCV, name))
}

/// Boots to the first program, with nothing traced and with every function counted.
pub(crate) fn boots() -> Result<()> {
    println!("\nboot to init with every function counted (everything on one CPU)");
    whole_boot(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| whole_boot(&RISCV, name))
}

fn function(kernel: &str, name: &str) -> Result<String> {
    if name.starts_with("__") { Ok(name.to_owned()) } else { syscall(kernel, name) }
}

/// What a run says that begins to trace with the call of getpgid.
pub(crate) fn started(host: &SharedHost, name: &str, which: &str, args: &[&str]) -> Result<Run> {
    let from = syscall(name, "getpgid")?;
    // Who follows tasks does so from the beginning.
    let from: &[&str] = if args.contains(&"--children") { &[] } else { &["--from", &from] };
    work(host, name, &format!("bench-counts{which}"), &[from, args].concat())
}

pub(crate) fn measure(host: &SharedHost, name: &str, which: &str, args: &[&str]) -> Result<Run> {
    let run = started(host, name, which, args)?;
    let summary = &run.summary;
    ensure!(summary.lost() == 0 && summary.sites.skipped.is_empty(), "{summary:?}");
    Ok(run)
}

fn table(host: &SharedHost, name: &str) -> Result<()> {
    let getpriority = syscall(name, "getpriority")?;
    let guest = measure(host, name, " guest", &["-f", &getpriority])?;
    let tracers = ROWS.map(|(row, of, what)| {
        function(name, of).map(|function| format!("{row}={function}{what}"))
    });
    let tracers = tracers.into_iter().collect::<Result<Vec<_>>>()?;
    let args: Vec<&str> = tracers.iter().flat_map(|tracer| ["--tracer", &**tracer]).collect();
    let show = |row: &str, ours: f64| {
        let theirs = value(&guest.text, &format!("counts {row} "));
        let theirs = theirs.map_or_else(|_| "has none".to_owned(), |figure| format!("{figure:.1}"));
        println!("    {row:<16}  {ours:6.1}  {theirs:>8}");
    };
    let print = |row: &str, run: &Run| -> Result<()> {
        show(row, value(&run.text, &format!("counts {row} "))?);
        Ok(())
    };
    let check = |run: &Run| -> Result<()> {
        let records = &run.records;
        let meant = records.entries > 800_000 && records.returns == 0 && run.calls > 0;
        ensure!(meant, "{:?}", run.summary);
        Ok(())
    };
    let ours = measure(host, name, "", &args)?;
    check(&ours)?;
    println!("  {}: vmtrace, guest", ours.release);
    ROWS.iter().try_for_each(|(row, ..)| print(row, &ours))?;
    load(host, name, &guest)?;
    let block = measure(host, name, "", &[&args[..], &["--overflow", "block"]].concat())?;
    check(&block)?;
    println!("    with --overflow block:");
    ["argument-holds", "entry"].into_iter().try_for_each(|row| print(row, &block))?;
    // In this boot nobody traces it.
    show("children-fail", family(host, name, &ours)?);
    Ok(())
}

/// That row alone.
pub(crate) fn children() -> Result<()> {
    println!("\ninstructions a call of a task that is not followed");
    let row = |host, name| {
        let other = syscall(name, "getpriority")?;
        let ours = measure(host, name, "", &["-f", &other])?;
        println!("  {}: {:.1}", ours.release, family(host, name, &ours)?);
        Ok(())
    };
    row(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| row(&RISCV, name))
}

/// What a call of a task costs that is not followed, beyond what it does in another boot.
fn family(host: &SharedHost, name: &str, ours: &Run) -> Result<f64> {
    let getegid = syscall(name, "getegid")?;
    let family = ["-f", &getegid, "--comm", "nobody", "--children"];
    let family = measure(host, name, "", &family)?;
    ensure!(family.summary.records() == 0, "{:?}", family.summary);
    let [whole, untraced] =
        [&family, ours].map(|run| value(&run.text, "counts whole-children-fail "));
    Ok(whole? - untraced?)
}

/// Forks and files with every function counted.
fn load(host: &SharedHost, name: &str, guest: &Run) -> Result<()> {
    let stop = syscall(name, "getsid")?;
    let run = measure(host, name, " load", &["--count", "--stop-at", &stop])?;
    let [more, rounds, round] =
        ["more", "rounds", "round"].map(|key| value(&run.text, &format!("counts {key} ")));
    let calls = as_float(run.calls) / rounds?;
    println!(
        "    every function: {calls:.0} calls in a round of {:.0} instructions; counted {:.1} more a call, guest's function tracer {:.1}",
        round?,
        more? / calls,
        value(&guest.text, "counts each ")?,
    );
    Ok(())
}

fn whole_boot(host: &SharedHost, name: &str) -> Result<()> {
    let none = syscall(name, "getpgid")?;
    let (untraced, run) = cost(host, name, &["-f", &none], "")?;
    let (counted, ours) = cost(host, name, &["--count"], "")?;
    let patching = millions(ours.summary.patch_ns) / 1e3;
    println!(
        "  {}: a boot to init takes {untraced:.3} * 10^9, with every function counted {counted:.3} (patching {patching:.3} of it): \
         {} calls, {:.1} more each",
        run.release,
        ours.calls,
        (counted - untraced - patching) * 1e9 / as_float(ours.calls),
    );
    ensure!(ours.summary.records() == 0 && ours.calls > 1_000_000, "{:?}", ours.summary);
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub(crate) fn as_float(calls: u64) -> f64 {
    calls as f64
}
