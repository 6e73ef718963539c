//! A long run: `soak [--minutes N] [--arch ARCH] [--kernel NAME] [--seed N]`. `scripts/soak` builds what it needs.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use vmtrace_tests::soak::{Plan, soak};

const USAGE: &str = "\
usage: soak [--minutes N] [--arch x86_64|riscv64] [--kernel NAME] [--seed N]

  --minutes N    how long, once the guest is up (default: 120, at least 4)
  --arch ARCH    whose kernel 6.12 is run (default: x86_64)
  --kernel NAME  another kernel of the cache (see images/fetch list)
  --seed N       repeats a plan, not its moments

Exit code 1: the verdict is bad. scripts/soak builds what this needs.";
const OPTIONS: [&str; 4] = ["--minutes", "--arch", "--kernel", "--seed"];

fn main() -> ExitCode {
    let plan = match plan(std::env::args().skip(1)) {
        Ok(Some(plan)) => plan,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        // That says nothing of vmtrace.
        Err(error) => {
            eprintln!("soak: {error:#}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    println!("{}: {} minutes, seed {}", plan.kernel, plan.time.as_secs() / 60, plan.seed);
    match soak(&plan) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("verdict: bad\n{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `None`: only help is asked for.
fn plan(mut args: impl Iterator<Item = String>) -> Result<Option<Plan>> {
    let (mut minutes, mut kernel, mut arch, mut seed) = (120, None, None, 20_261_127);
    while let Some(arg) = args.next() {
        if matches!(&*arg, "-h" | "--help") {
            return Ok(None);
        }
        ensure!(OPTIONS.contains(&&*arg), "unknown option {arg}");
        let value = args.next().with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => minutes = value.parse().context("--minutes")?,
            "--arch" => arch = Some(value),
            "--kernel" => kernel = Some(value),
            "--seed" => seed = value.parse().context("--seed")?,
            _ => bail!("unknown option {arg}"),
        }
    }
    // Quarters of a run are compared, each by two looks at vmtrace at the least.
    ensure!(minutes >= 4, "--minutes: at least 4, or growth cannot be told");
    ensure!(seed > 0, "--seed: a number from 1 on");
    let kernel = match (kernel, arch) {
        (Some(kernel), None) => kernel,
        (None, arch) => format!("{}-6.12", arch.as_deref().unwrap_or("x86_64")),
        (Some(_), Some(_)) => bail!("--kernel tells the architecture: leave out --arch"),
    };
    Ok(Some(Plan { time: Duration::from_secs(60 * minutes), kernel, seed }))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Who asks for help has not found vmtrace to be bad.
    #[test]
    fn help_and_slips_are_no_verdicts() {
        let plan = |line: &str| plan(line.split_whitespace().map(str::to_owned));
        for help in ["--help", "-h", "--minutes 5 --help"] {
            assert!(plan(help).unwrap().is_none(), "{help}");
        }
        for slip in ["--minute 5", "--minutes", "--minutes x", "--minutes 3", "--seed 0", "x"] {
            assert!(plan(slip).is_err(), "{slip}");
        }
        let plan = plan("--minutes 5 --arch riscv64").unwrap().unwrap();
        assert_eq!((plan.time.as_secs(), &*plan.kernel), (300, "riscv64-6.12"));
    }
}
