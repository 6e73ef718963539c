//! The notes in the summary. Their number is bounded, since a guest can cause any number.

/// Several times what the strangest guest causes without meaning to.
const MOST: usize = 1000;
const LEFT_OUT: &str = "more notes were left out, such as";

/// How many notes of a run were left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Notes {
    left_out: u64,
    /// Which of those that are kept says so.
    at: usize,
}

impl Notes {
    /// Adds one, and tells it to the user at once; beyond the most there can be, one more says how many
    /// are missing.
    pub(super) fn keep(&mut self, notes: &mut Vec<String>, text: String) {
        if notes.len() < MOST && !self.are_full() {
            log::warn!("{text}");
            notes.push(text);
            return;
        }
        self.left_out += 1;
        let told = format!("{} {LEFT_OUT}: {text}", self.left_out);
        if self.left_out == 1 {
            log::warn!("more notes are not shown: the summary counts them");
            self.at = notes.len();
            notes.push(told);
        } else if let Some(own) = notes.get_mut(self.at).filter(|it| it.contains(LEFT_OUT)) {
            // Others may be behind it.
            *own = told;
        }
    }

    /// Whether there is no room for more.
    pub(super) fn are_full(self) -> bool {
        self.left_out > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A guest could fill the machine's memory with them, or the log of who runs it.
    #[test]
    fn notes_are_bounded_and_those_left_out_are_counted() {
        let (mut notes, mut all) = (Notes::default(), Vec::new());
        for number in 0..MOST {
            notes.keep(&mut all, number.to_string());
        }
        assert!(!notes.are_full() && all.len() == MOST && all[MOST - 1] == (MOST - 1).to_string());
        for number in 0..5000 {
            if number == 4000 {
                all.push("of the end".to_owned());
            }
            notes.keep(&mut all, format!("again {number}"));
        }
        assert!(notes.are_full());
        assert_eq!((all.len(), &*all[MOST + 1]), (MOST + 2, "of the end"));
        assert_eq!(all[MOST], "5000 more notes were left out, such as: again 4999");
    }
}
