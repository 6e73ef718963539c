//! Keys that are typed where a command shows something that changes.

use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd as _;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices as Special, Termios, tcgetattr, tcsetattr,
};
use nix::unistd::{getpgrp, read, tcgetpgrp};

/// Standard input, if that is a terminal: while this lives keys come one by one and are not shown, and none is
/// left for the shell.
#[derive(Debug)]
pub(super) struct Keys {
    terminal: io::Stdin,
    /// As it was found, where it was changed: in the background it is another job's.
    found: Option<Termios>,
}

impl Keys {
    pub(super) fn new() -> Self {
        let mut keys = Self { terminal: io::stdin(), found: None };
        keys.take();
        keys
    }

    /// Takes the terminal, if it is this job's.
    pub(super) fn take(&mut self) {
        let in_background = tcgetpgrp(&self.terminal).is_ok_and(|group| group != getpgrp());
        if self.found.is_some() || in_background || !self.terminal.is_terminal() {
            return;
        }
        let Ok(found) = tcgetattr(&self.terminal) else { return };
        let mut single = found.clone();
        single.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
        for (which, value) in [(Special::VMIN, 1), (Special::VTIME, 0)] {
            if let Some(place) = single.control_chars.get_mut(which as usize) {
                *place = value;
            }
        }
        // Without this keys are what they were: signals end it, too.
        if tcsetattr(&self.terminal, SetArg::TCSANOW, &single).is_ok() {
            self.found = Some(found);
        }
    }

    /// Gives it back as it was found.
    pub(super) fn give_back(&mut self) {
        if let Some(found) = self.found.take() {
            // Nobody is left to be told of a terminal that is gone.
            let _ = tcsetattr(&self.terminal, SetArg::TCSANOW, &found);
        }
    }

    /// Whether one that ends it was typed. Does not wait.
    pub(super) fn say_end(&mut self) -> bool {
        // What was in the background may have been put into the foreground.
        self.take();
        let mut typed = [0; 64];
        while self.found.is_some() {
            let mut ready = [PollFd::new(self.terminal.as_fd(), PollFlags::POLLIN)];
            if !matches!(poll(&mut ready, PollTimeout::ZERO), Ok(1)) {
                return false;
            }
            let Ok(count @ 1..) = read(&self.terminal, &mut typed) else {
                // It has hung up, which a signal tells as well.
                self.found = None;
                return false;
            };
            if typed.iter().take(count).any(|key| b"qQ".contains(key)) {
                return true;
            }
        }
        false
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.give_back();
    }
}
