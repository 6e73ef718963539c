//! A guest that does not run: its memory.

use vm_memory::VolatileSlice;

/// Guest-physical memory of a guest that is paused.
///
/// Nothing read through this is trusted.
pub trait Guest {
    /// Fills `out` from guest-physical `address`.
    ///
    /// # Errors
    /// When any byte of it is no RAM.
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError>;

    /// Writes `bytes` at guest-physical `address`.
    ///
    /// # Errors
    /// When any byte of it is no RAM; then nothing is promised about the rest.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError>;

    /// Writes an aligned little-endian word at guest-physical `address`, in one store
    /// where that matters: a guest that looks sees the old word or the new one.
    ///
    /// # Errors
    /// As [`Guest::write`].
    fn write_u64(&self, address: u64, word: u64) -> Result<(), GuestError> {
        self.write(address, &word.to_le_bytes())
    }

    /// A little-endian word at guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::read`].
    fn read_u64(&self, address: u64) -> Result<u64, GuestError> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// The run of RAM that guest-physical `address` is in, for many accesses: its first address
    /// and all of it. `None` where there is no RAM, or every access is to be a call.
    fn run(&self, _address: u64) -> Option<(u64, VolatileSlice<'_>)> {
        None
    }
}

/// Where a walk ended without a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// The guest has not turned paging on.
    #[error("paging is off")]
    Off,
    /// No present entry at this level (1 is the last).
    #[error("not mapped (no entry at level {0})")]
    NotPresent(u32),
    /// A larger or smaller page than asked for.
    #[error("mapped by a page of another size (level {0})")]
    OtherSize(u32),
}

/// What to say of places (run-time addresses) that failed: of the first few, why.
fn several(failed: &[(u64, GuestError)]) -> String {
    const FEW: usize = 4;
    let each = failed.iter().take(FEW).map(|(at, why)| format!("{at:#x} ({why})"));
    let each = each.collect::<Vec<_>>().join(", ");
    match failed.len().saturating_sub(FEW) {
        0 => format!("not given back: {each}"),
        more => format!("not given back: {each} and {more} more"),
    }
}

/// Why guest memory could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// Not RAM.
    #[error("guest-physical address {0:#x} is not guest RAM")]
    NoRam(u64),
    /// Not mapped, or mapped in a way the walk does not follow.
    #[error("guest-virtual address {address:#x}: {cause}")]
    Unmapped {
        /// Guest virtual address.
        address: u64,
        /// Where the walk ended.
        cause: WalkError,
    },
    /// Several places failed, each for its reason; others did not.
    #[error("{}", several(.0))]
    Several(Vec<(u64, GuestError)>),
    /// The guest's memory does not hold the kernel that was given.
    #[error("{0}")]
    Mismatch(String),
}
