//! `vmtrace doctor`: what this machine can do, and how to get the rest.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::Result;

use super::exit;
use crate::emulated::{
    Check, EmulatedHost, HostArch, HostOptions, Job, THIS_PROGRAM, emulated_host_checks,
};
use crate::host::probe;

/// Arguments of `vmtrace doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also start the emulated hosts and check the KVM in them
    #[arg(long)]
    boot: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Check KVM in this process itself, and print a line of JSON for each check
    #[arg(long, hide = true)]
    kvm_probe_worker: bool,
}

/// Looks at everything; fails if there is nothing to run guests on.
///
/// # Errors
/// When the results cannot be written.
pub fn run(args: &Args) -> Result<u8> {
    let mut out = std::io::stdout().lock();
    if args.kvm_probe_worker {
        probe::worker(out);
        return Ok(exit::DONE);
    }
    let kvm = probe::probe(Path::new(THIS_PROGRAM));
    let look = |arch: HostArch| {
        let mut checks = emulated_host_checks(arch);
        if args.boot && usable(&checks) {
            checks.push(boot(arch));
        }
        Emulated { arch, checks }
    };
    let native = look(HostArch::native());
    let others = HostArch::ALL.into_iter().filter(|arch| !arch.is_native());
    let hosts: Vec<Emulated> = std::iter::once(native).chain(others.map(look)).collect();
    let text = if args.json {
        let hosts = hosts.iter().map(|host| {
            let usable = usable(&host.checks);
            (
                host.arch.name().to_owned(),
                serde_json::json!({ "usable": usable, "checks": host.checks }),
            )
        });
        let hosts: serde_json::Map<_, _> = hosts.collect();
        let json = serde_json::json!({
            "arch": HostArch::native().name(),
            "kvm": { "usable": kvm.usable, "checks": kvm.checks },
            "emulated_hosts": hosts,
        });
        format!("{json:#}\n")
    } else {
        report(kvm.usable, &kvm.checks, &hosts)
    };
    super::inspect::ignore_closed_pipe(out.write_all(text.as_bytes()))?;
    Ok(if kvm.usable || usable(&hosts[0].checks) { exit::DONE } else { exit::FAILED })
}

/// What an emulated host needs.
struct Emulated {
    arch: HostArch,
    checks: Vec<Check>,
}

fn usable(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.ok)
}

/// The first of the emulated hosts is that of this machine's architecture.
fn report(kvm_usable: bool, kvm: &[Check], emulated: &[Emulated]) -> String {
    let mut text = String::new();
    let mut section = |title: &str, usable: bool, checks: &[Check]| {
        let _ = writeln!(text, "{title}: {}", if usable { "usable" } else { "not usable" });
        for check in checks {
            let _ = writeln!(text, "  {}  {check}", if check.ok { "ok  " } else { "FAIL" });
        }
    };
    section("KVM on this machine", kvm_usable, kvm);
    for host in emulated {
        let title = format!("Emulated host for {} guests", host.arch.name());
        section(&title, usable(&host.checks), &host.checks);
    }
    let native = emulated.first().is_some_and(|host| usable(&host.checks));
    text.push_str(match (kvm_usable, native) {
        (true, _) => "Guests of this machine's architecture run on its KVM.\n",
        (false, true) => {
            "Guests run in an emulated host, much slower than on KVM. For KVM: a machine with hardware virtualisation\n\
             (VT-x, AMD-V, the H extension), bare or nested, with its KVM module loaded and /dev/kvm accessible.\n"
        }
        (false, false) => {
            "Guests cannot run here. An emulated host needs what failed above: QEMU comes from your distribution, kernel and\n\
             modules by vmtrace setup (all of it in a clone: scripts/setup). With a usable KVM it is not needed.\n"
        }
    });
    text
}

fn boot(arch: HostArch) -> Check {
    let check = |ok, detail| Check { name: "start".to_owned(), ok, detail };
    let options = HostOptions::new(arch);
    let host = options.and_then(|usual| {
        let source = crate::SOURCE;
        EmulatedHost::start(&HostOptions { source, progress: true, ..usual })
    });
    let mut host = match host {
        Ok(host) => host,
        Err(e) => return check(false, e.to_string()),
    };
    let time = host.start_time().as_secs_f64();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let end = host.run(Job::new(["doctor", "--json"], &mut stdout, &mut stderr));
    let inner: serde_json::Value = serde_json::from_slice(&stdout).unwrap_or_default();
    match end {
        Err(e) => check(false, e.to_string()),
        Ok(_) if inner["kvm"]["usable"] == true => {
            check(true, format!("{time:.1} s, and the KVM in it is usable"))
        }
        Ok(_) => check(false, format!("the KVM in it is not usable: {}", inner["kvm"]["checks"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_what_failed() {
        let check = |ok| Check { name: "thing".to_owned(), ok, detail: "because".to_owned() };
        let emulated = |arch, ok| Emulated { arch, checks: vec![check(true), check(ok)] };
        let (x86, riscv) = (HostArch::X86_64, HostArch::Riscv64);
        let hosts = [emulated(x86, true), emulated(riscv, false)];
        let text = report(false, &[check(true), check(false)], &hosts);
        assert!(text.starts_with(
            "KVM on this machine: not usable\n  ok    thing: because\n  FAIL  thing: because\n"
        ));
        assert!(text.contains("Emulated host for x86_64 guests: usable"), "{text}");
        assert!(text.contains("Emulated host for riscv64 guests: not usable"), "{text}");
        assert!(report(false, &[], &[emulated(x86, false)]).contains("vmtrace setup"));
    }
}
