//! A long run: `soak [--minutes N] [--arch ARCH] [--kernel NAME] [--seed N]`. `scripts/soak` builds what it needs.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use vmtrace_tests::soak::{Plan, soak};

fn main() -> ExitCode {
    match plan().and_then(|plan| soak(&plan)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("verdict: bad\n{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn plan() -> Result<Plan> {
    let (mut minutes, mut kernel, mut arch, mut seed) = (120, None, None, 20_261_127);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => minutes = value.parse().context("--minutes")?,
            "--arch" => arch = Some(value),
            "--kernel" => kernel = Some(value),
            "--seed" => seed = value.parse().context("--seed")?,
            _ => bail!("unknown option {arg}: use --minutes, --arch, --kernel or --seed"),
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
    println!("{kernel}: {minutes} minutes, seed {seed}");
    Ok(Plan { time: Duration::from_secs(60 * minutes), kernel, seed })
}
