//! Calls of the guest to what would be its firmware, as far as KVM leaves them to its user.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The extension whose calls are traps; see [`super::TRAP_INSTRUCTION`].
pub(super) const TRAP: u64 = 0x0976_d000;
/// The extension whose calls wait for room; see [`super::WAIT_INSTRUCTION`].
pub(super) const WAIT: u64 = 0x0976_e000;
/// The debug console (SBI 2.0, chapter 12).
const DEBUG_CONSOLE: u64 = 0x4442_434e;

/// The answer to calls that nobody knows.
pub(super) const NOT_SUPPORTED: i64 = -2;
const INVALID_PARAM: i64 = -3;

/// The most that one call writes, in bytes: the guest calls again for the rest.
const MAX_WRITE: u64 = 4096;

/// A call, and the registers that are its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) extension: u64,
    pub(super) function: u64,
    pub(super) arguments: [u64; 6],
}

/// What comes of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// For a0: 0 or what went wrong.
    pub(super) error: i64,
    /// For a1.
    pub(super) value: u64,
    /// What is written to the debug console.
    pub(super) output: Vec<u8>,
}

impl Answer {
    fn new(error: i64, output: Vec<u8>, value: u64) -> Answer {
        Answer { error, value, output }
    }
}

/// Answers a call that is no trap.
pub(super) fn answer(call: &Call, memory: &GuestMemoryMmap) -> Answer {
    let [first, low, high, ..] = call.arguments;
    match (call.extension, call.function) {
        (DEBUG_CONSOLE, 0) => {
            let length = usize::try_from(first.min(MAX_WRITE)).unwrap_or(0);
            let mut bytes = vec![0; length];
            if high != 0 || memory.read_slice(&mut bytes, GuestAddress(low)).is_err() {
                return Answer::new(INVALID_PARAM, Vec::new(), 0);
            }
            Answer::new(0, bytes, length as u64)
        }
        // Nothing is ever typed here.
        (DEBUG_CONSOLE, 1) => Answer::new(0, Vec::new(), 0),
        (DEBUG_CONSOLE, 2) => Answer::new(0, first.to_le_bytes()[..1].to_vec(), 0),
        _ => Answer::new(NOT_SUPPORTED, Vec::new(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x8000_0000;

    fn call(extension: u64, function: u64, arguments: [u64; 3]) -> (i64, u64, Vec<u8>) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(BASE), 8192)]).unwrap();
        memory.write_slice(b"hello", GuestAddress(BASE)).unwrap();
        let [a, b, c] = arguments;
        let call = Call { extension, function, arguments: [a, b, c, 0, 0, 0] };
        let Answer { error, value, output } = answer(&call, &memory);
        (error, value, output)
    }

    #[test]
    fn the_debug_console_writes() {
        assert_eq!(call(DEBUG_CONSOLE, 0, [5, BASE, 0]), (0, 5, b"hello".to_vec()));
        assert_eq!(call(DEBUG_CONSOLE, 2, [0x158, 0, 0]), (0, 0, b"X".to_vec()));
        assert_eq!(call(DEBUG_CONSOLE, 1, [5, BASE, 0]), (0, 0, vec![]));
        let (error, value, output) = call(DEBUG_CONSOLE, 0, [u64::MAX, BASE, 0]);
        assert_eq!((error, value, output.len()), (0, 4096, 4096));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (low, high) in [(0, 0), (BASE + 8190, 0), (u64::MAX, 0), (BASE, 1)] {
            assert_eq!(call(DEBUG_CONSOLE, 0, [5, low, high]), (INVALID_PARAM, 0, vec![]));
        }
        assert_eq!(call(DEBUG_CONSOLE, 3, [0; 3]), (NOT_SUPPORTED, 0, vec![]));
        assert_eq!(call(0x0900_0000, 0, [0; 3]), (NOT_SUPPORTED, 0, vec![]));
    }
}
