//! Guest memory as it would be without our changes: code that is looked through must not be our own.

use super::edit::Edit;
use super::guest::{Guest, GuestError};
use super::trace::Attachment;

/// Bytes of the longest edit.
const LONGEST: u64 = 8;

/// A guest with what was there in the place of what is ours.
pub(super) struct Unpatched<'a> {
    guest: &'a dyn Guest,
    /// By address.
    edits: Vec<Edit>,
}

impl<'a> Unpatched<'a> {
    pub(super) fn new(guest: &'a dyn Guest, mut edits: Vec<Edit>) -> Self {
        edits.sort_unstable_by_key(Edit::address);
        Self { guest, edits }
    }
}

impl Guest for Unpatched<'_> {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        self.guest.read(address, out)?;
        let first =
            self.edits.partition_point(|it| it.address().saturating_add(LONGEST) <= address);
        let end = address.saturating_add(out.len() as u64);
        let near = self.edits.get(first..).unwrap_or_default().iter();
        for edit in near.take_while(|edit| edit.address() < end) {
            edit.lay_original(self.guest, address, out)?;
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        self.guest.write(address, bytes)
    }
}

impl Attachment {
    /// A guest without what is ours in its modules.
    pub(super) fn modules_unpatched<'a>(&self, guest: &'a dyn Guest) -> Unpatched<'a> {
        let sites = self.patcher.edits_of(|site| self.modules.is_of_module(site));
        let exits = self.exits.edits_of(|exit| self.modules.exit(exit).is_some());
        let switches = self.switches.edits_of(|place| self.modules.switch(place).is_some());
        Unpatched::new(guest, sites.chain(exits).chain(switches).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::Ram;
    use crate::tracer::view::View;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    #[test]
    fn what_is_ours_is_not_read_wherever_it_begins() {
        const AT: u64 = 0x100;
        let ram = Ram(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap());
        let own: Vec<u8> = (1..=40).collect();
        ram.write(AT, &own).unwrap();
        let edit = |at: usize, len: usize| {
            Edit::new(AT + at as u64, &own[at..at + len], &[0xee; 8][..len]).unwrap()
        };
        let edits = vec![edit(20, 8), edit(3, 5), edit(8, 1), edit(30, 5)];
        let view = View::ram(&ram, [AT; 2]);
        edits.iter().for_each(|edit| assert!(edit.apply(&view).unwrap()));
        // By now of somebody else, who has changed one byte.
        ram.write(AT + 31, &[0xcc]).unwrap();
        let mut expected = own.clone();
        expected[30..35].copy_from_slice(&[0xee, 0xcc, 0xee, 0xee, 0xee]);
        let unpatched = Unpatched::new(&ram, edits);
        for start in 0..40 {
            for end in start..=40 {
                let mut found = vec![0; end - start];
                unpatched.read(AT + start as u64, &mut found).unwrap();
                assert_eq!(found, expected[start..end], "{start}..{end}");
            }
        }
        assert!(unpatched.read(0xfff, &mut [0; 2]).is_err());
    }
}
