//! The time that the seccomp filter of a vCPU's thread adds to every entry into the guest: an
//! `ioctl` that the kernel refuses at once, alternately without and with the filter.
//!
//! `cargo bench -p vmtrace --bench sandbox`

use vmtrace::sandbox::trial::cost;
use vmtrace::sandbox::{Settings, Thread, set_up};

const CALLS: u32 = 1_000_000;
const ROUNDS: usize = 11;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    set_up(&Settings::default())?;
    let (mut bare, mut filtered) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bare.push(cost(None, CALLS)?);
        filtered.push(cost(Some(Thread::Vcpu), CALLS)?);
    }
    for (what, mut times) in [("no filter", bare), ("filter of a vCPU's thread", filtered)] {
        times.sort_unstable();
        let (least, median) = (times[0].as_nanos(), times[ROUNDS / 2].as_nanos());
        println!("ioctl(-1, KVM_RUN), {what}: median {median} ns, least {least} ns");
    }
    Ok(())
}
