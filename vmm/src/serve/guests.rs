//! Decides which processes of the guest may read the trace.

use clap::ValueEnum;

/// Processes of the guest that may read the trace. It shows what all others do, and in its header
/// where KASLR has put the kernel, so nobody may unless the user says so. Marks are open to all in
/// any case: they tell nothing of the trace, and are shown as words of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GuestReaders {
    /// None of them
    #[default]
    None,
    /// Those that connect from a port below 1024, which takes CAP_NET_BIND_SERVICE
    Privileged,
    /// Any process
    All,
}

/// Linux lets only privileged processes bind vsock ports below this one
/// (`LAST_RESERVED_PORT`, net/vmw_vsock/af_vsock.c).
pub(crate) const FIRST_UNPRIVILEGED_PORT: u32 = 1024;

impl GuestReaders {
    /// Whether a process that has connected from `guest_port` may read.
    ///
    /// # Errors
    /// Why not, and what can be done about it.
    pub fn check(self, guest_port: u32) -> Result<(), &'static str> {
        match self {
            Self::None => {
                Err("this run does not serve its guest: boot it with vmtrace boot --serve-guest")
            }
            Self::Privileged if guest_port >= FIRST_UNPRIVILEGED_PORT => Err(
                "only privileged processes of the guest are served, which connect from a vsock \
                     port below 1024: see vmtrace boot --serve-guest=all",
            ),
            Self::Privileged | Self::All => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Whoever reads the trace knows where the kernel is.
    #[test]
    fn nobody_reads_who_was_not_asked_in() {
        for port in [0, 1, 1023, 1024, u32::MAX] {
            assert!(GuestReaders::default().check(port).unwrap_err().contains("--serve-guest"));
            assert_eq!(GuestReaders::All.check(port), Ok(()));
        }
        let privileged = |port| GuestReaders::Privileged.check(port);
        assert_eq!((privileged(1), privileged(1023)), (Ok(()), Ok(())));
        for port in [1024, 1025, u32::MAX] {
            assert!(privileged(port).unwrap_err().contains("below 1024"));
        }
    }
}
