//! Recognises a kernel panic on the console.

use std::sync::{Mutex, PoisonError};

/// What a panicking kernel prints before its reason.
const PANIC: &str = "Kernel panic - not syncing: ";
/// What it prints before it halts for good, then again with its reason.
const END: &str = "---[ end Kernel panic - not syncing";
/// The longest line that is looked at, in bytes; of a longer one this much. `printk` makes no line
/// longer than 1 KiB.
const LINE: usize = 1024;

/// Reads along what the guest prints and remembers its first panic.
///
/// Works for every kernel whose console shows messages of emergency level. Anything in the guest
/// that may write to the console can make it seem to have panicked: so this counts only as long as
/// there is no better [`Witness`], and before there are processes at all.
#[derive(Debug, Default)]
pub struct PanicWatch {
    state: Mutex<State>,
}

/// What the console is believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Witness {
    /// That the kernel panics, why, and when it has halted.
    #[default]
    Whole,
    /// Nothing: somebody else knows of a panic.
    Nobody,
    /// That the kernel has halted: it is known to panic.
    EndAlone,
}

#[derive(Debug, Default)]
struct State {
    line: Vec<u8>,
    message: Option<String>,
    ended: bool,
    witness: Witness,
}

impl PanicWatch {
    /// Believes it so much from now on. What it said before is forgotten; returns the reason of the panic, if there
    /// was one.
    pub fn set(&self, witness: Witness) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *state, State { witness, ..State::default() }).message
    }

    /// Reads a piece of console output.
    pub fn feed(&self, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for &byte in bytes {
            if byte == b'\n' {
                state.end_line();
            } else if state.line.len() < LINE {
                state.line.push(byte);
            }
        }
    }

    /// The reason of the panic, if there was one.
    #[must_use]
    pub fn message(&self) -> Option<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).message.clone()
    }

    /// Whether the kernel has halted for good after a panic.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).ended
    }
}

impl State {
    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.line);
        let end = line.contains(END);
        let believed = match self.witness {
            Witness::Whole => end && self.message.is_some(),
            Witness::EndAlone => end,
            Witness::Nobody => false,
        };
        if let Some((_, reason)) = line.split_once(PANIC)
            && !end
            && self.message.is_none()
            && self.witness == Witness::Whole
        {
            self.message = Some(reason.trim_end().to_owned());
        }
        self.ended |= believed;
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_a_panic_in_any_pieces() {
        let text = "[    1.0] Kernel panic - not syncing: VFS: Unable to mount root fs\r\n\
                    [    1.1] CPU: 0\r\n";
        for size in [1, 2, 7, 1000] {
            let watch = PanicWatch::default();
            text.as_bytes().chunks(size).for_each(|piece| watch.feed(piece));
            assert_eq!(watch.message().as_deref(), Some("VFS: Unable to mount root fs"));
            assert!(!watch.ended());
        }
    }

    #[test]
    fn sees_the_end_and_keeps_the_first_reason() {
        let watch = PanicWatch::default();
        watch.feed(b"---[ end Kernel panic - not syncing: early ]---\n");
        assert!(!watch.ended());
        watch.feed(b"Kernel panic - not syncing: first\nKernel panic - not syncing: second\n");
        watch.feed(b"---[ end Kernel panic - not syncing: first ]---");
        assert!(!watch.ended());
        watch.feed(b"\n");
        assert!(watch.ended());
        assert_eq!(watch.message().as_deref(), Some("first"));
    }

    // What a process echoes must neither end a healthy guest nor change what its end is called.
    #[test]
    fn it_is_believed_as_long_as_nobody_knows_better() {
        let echoed =
            b"Kernel panic - not syncing: x\n---[ end Kernel panic - not syncing: x ]---\n";
        let watch = PanicWatch::default();
        assert_eq!(watch.set(Witness::Nobody), None);
        watch.feed(echoed);
        assert!(!watch.ended() && watch.message().is_none());
        assert_eq!(watch.set(Witness::EndAlone), None);
        assert!(!watch.ended(), "what came before the panic");
        watch.feed(b"Kernel panic - not syncing: x\n");
        assert!(!watch.ended() && watch.message().is_none());
        watch.feed(b"[    1.1] ---[ end Kernel panic - not syncing: x ]---\n");
        assert!(watch.ended() && watch.message().is_none());
        // Nor is lost what it told when it was believed.
        assert_eq!(watch.set(Witness::Whole), None);
        watch.feed(b"Kernel panic - not syncing: y\n");
        assert_eq!(watch.set(Witness::EndAlone).as_deref(), Some("y"));
        assert!(watch.message().is_none());
    }

    #[test]
    fn endless_lines_are_bounded() {
        let watch = PanicWatch::default();
        for _ in 0..10_000 {
            watch.feed(&[0xff; 100]);
        }
        assert!(watch.state.lock().unwrap().line.len() <= LINE);
        watch.feed(b"\nKernel panic - not syncing: x\n");
        assert_eq!(watch.message().as_deref(), Some("x"));
    }
}
