//! Kernels of one guest that run at different addresses (KASLR).
//!
//! A stream has the addresses of the guest's first kernel. Another kernel that the guest starts (kexec) runs the
//! same image, moved by another distance, the slide. What it says of places in its image is translated to where
//! the first one has them, so that a function, a caller or an event is one thing in the whole stream.
//!
//! Everything else keeps its address: stacks, what was allocated, the annex, and modules. The space of modules lies
//! behind that in which an image can be moved, wherever it is (arch/x86/include/asm/pgtable_64_types.h), so that no
//! address is of both.

use super::Targets;
use super::events::{EventTarget, Events};
use super::names::Functions;
use super::programs::Programs;
use super::values::Untold;
use crate::kernel::Kernel;
use crate::stream::Header;
use crate::tracer::{CallerHits, ExitWord, Module, RawBatch, RawRecord};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Where the image is, and where the stream has it.
#[derive(Clone, Debug)]
pub(super) struct Slides {
    /// Its link addresses.
    image: Range<u64>,
    /// The slide of the first kernel, and that of the one that runs now.
    first: u64,
    now: u64,
}

/// The link addresses of a kernel's image, from its text to its end; `None` when it does not tell.
#[must_use]
pub fn image(kernel: &Kernel) -> Option<Range<u64>> {
    let address = |name| kernel.symbols().address(name);
    let start = address("_text").or_else(|| address("_stext"));
    start.zip(address("_end")).map(|(start, end)| start..end)
}

impl Slides {
    /// The first kernel runs at `first`.
    pub(super) fn new(kernel: &Kernel, first: u64) -> Self {
        Self { image: image(kernel).unwrap_or_default(), first, now: first }
    }

    /// Another one runs at `now`.
    pub(super) fn enter(&mut self, now: u64) {
        self.now = now;
    }

    /// Whether anything is to be translated.
    #[inline]
    pub(super) fn differ(&self) -> bool {
        self.now != self.first
    }

    /// Where the first kernel has what is at this run-time address of the present one.
    fn address(&self, address: u64) -> u64 {
        let link = address.wrapping_sub(self.now);
        if self.image.contains(&link) { link.wrapping_add(self.first) } else { address }
    }

    /// The same of the low half of an address.
    fn low(&self, low: u32) -> u32 {
        let address = self.address(Header::TOP_4_GIB | u64::from(low));
        u32::try_from(address & u64::from(u32::MAX)).unwrap_or(low)
    }

    /// The link address in the first kernel of what has this one in the present one. What is not of the image is
    /// linked as if it had been moved with it.
    fn link(&self, link: u64) -> u64 {
        let runtime = self.address(link.wrapping_add(self.now));
        runtime.wrapping_sub(self.first)
    }

    /// What the first kernel's programs would write.
    pub(super) fn targets<'a>(&self, targets: &'a Targets) -> Cow<'a, Targets> {
        if !self.differ() {
            return Cow::Borrowed(targets);
        }
        let event = |target: &EventTarget| EventTarget {
            address: self.link(target.address),
            word: self.low(target.word),
            event: Arc::clone(&target.event),
        };
        let events = targets.events.iter().map(event).collect();
        let exits = self.exits(&targets.exits).into_owned();
        Cow::Owned(Targets { exits, events, ..targets.clone() })
    }

    /// The same of exits.
    pub(super) fn exits<'a>(&self, exits: &'a [ExitWord]) -> Cow<'a, [ExitWord]> {
        if !self.differ() {
            return Cow::Borrowed(exits);
        }
        let exit = |exit: &ExitWord| ExitWord {
            word: self.low(exit.word),
            function: self.link(exit.function),
            // 0 is no address.
            target: if exit.target == 0 { 0 } else { self.link(exit.target) },
            ..*exit
        };
        exits.iter().map(exit).collect()
    }

    /// A module, which is where it is, with sites that are linked with the first kernel.
    pub(super) fn module(&self, mut module: Arc<Module>) -> Arc<Module> {
        if self.differ() {
            for (_, function) in &mut Arc::make_mut(&mut module).functions {
                let site = &mut Arc::make_mut(function).site;
                (site.location, site.entry) = (self.link(site.location), self.link(site.entry));
            }
        }
        module
    }

    /// Counts by callers of the first kernel.
    pub(super) fn callers(&self, mut counted: Vec<CallerHits>) -> Vec<CallerHits> {
        if self.differ() {
            for (_, caller, _) in counted.iter_mut().flat_map(|of| &mut of.hits) {
                *caller = self.low(*caller);
            }
        }
        counted
    }

    /// What was taken from a ring, as the first kernel would have written it.
    pub(super) fn batch(&self, raw: &mut RawBatch, known: &Meanings<'_>) {
        let RawBatch { records, extra } = raw;
        let mut addresses = Vec::new();
        for record in records {
            (record.site, record.caller) = (self.low(record.site), self.low(record.caller));
            let start = record.extra as usize;
            let fields = extra.get_mut(start..start + usize::from(record.fields));
            let Some(fields) = fields.filter(|fields| !fields.is_empty()) else { continue };
            addresses.clear();
            known.addresses(record, fields, &mut addresses);
            // Several may want one field.
            addresses.sort_unstable();
            addresses.dedup();
            for &at in &addresses {
                if let Some(word) = fields.get_mut(at) {
                    *word = self.address(*word);
                }
            }
        }
    }
}

/// What tells which fields of a record are addresses.
pub(super) struct Meanings<'a> {
    pub(super) programs: &'a Programs,
    pub(super) functions: &'a Functions,
    pub(super) events: &'a Events,
    pub(super) untold: &'a Untold,
}

impl Meanings<'_> {
    /// Adds the places of words that may be addresses, of a record whose site is the first kernel's.
    fn addresses(&self, record: &RawRecord, fields: &[u64], places: &mut Vec<usize>) {
        let Some(format) = self.programs.format(record) else { return };
        if let Some(event) = self.events.find(record.site, fields) {
            places.extend(event.into_iter().flat_map(|event| self.events.addresses(event)));
        } else if let Some(function) = self.functions.function(format.point, record.site) {
            format.addresses(function, self.untold, places);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::After;

    const TEXT: u64 = 0xffff_ffff_8100_0000;
    const END: u64 = 0xffff_ffff_8400_0000;
    const MODULE: u64 = 0xffff_ffff_c000_0000;

    fn slides(first: u64, now: u64) -> Slides {
        Slides { image: TEXT..END, first, now }
    }

    // What is translated without being of the image is another function than the guest's; what is of it and is not
    // has the name of another, or none.
    #[test]
    fn what_is_of_the_image_is_translated_and_nothing_else() {
        for (first, now) in [(0, 0x3a00_0000), (0x3a00_0000, 0), (0x200_0000, 0x180_0000)] {
            let slides = slides(first, now);
            let [text, end] = [TEXT, END].map(|link| link + now);
            let there = |address: u64| address - now + first;
            for address in [text, text + 1, end - 1] {
                assert_eq!(slides.address(address), there(address), "{first:#x} {now:#x}");
                let low = u32::try_from(address - Header::TOP_4_GIB).unwrap();
                assert_eq!(Header::TOP_4_GIB | u64::from(slides.low(low)), there(address));
            }
            // What is beside the image, the end of the annex, a module, an address of the user, and none.
            for address in [text - 1, end, TEXT - 1, MODULE, text & 0xffff_ffff, 0] {
                assert_eq!(slides.address(address), address, "{first:#x} {now:#x} {address:#x}");
            }
            assert_eq!(slides.low(0), 0);
            // Link addresses of the image are those of both; a module stays where it is.
            for link in [TEXT, END - 1] {
                assert_eq!(slides.link(link), link);
            }
            assert_eq!(slides.link(MODULE - now).wrapping_add(first), MODULE);
        }
        // Ends of ranges that overlap, as those of two kernels do.
        let near = slides(0x20_0000, 0x40_0000);
        assert_eq!(near.address(TEXT + 0x40_0000), TEXT + 0x20_0000);
        assert_eq!(near.address(TEXT + 0x20_0000), TEXT + 0x20_0000);
    }

    // Rings are the guest's to write: whatever is there, and whatever is thought of the image, is a number.
    #[test]
    fn any_word_is_translated() {
        let words = [0, 1, TEXT, END, u64::MAX, u64::MAX - 1, i64::MAX.cast_unsigned(), 1 << 63];
        let reversed = Range { start: END, end: TEXT };
        for image in [TEXT..END, 0..u64::MAX, reversed, u64::MAX..u64::MAX] {
            for (first, now) in words.into_iter().flat_map(|a| words.map(|b| (a, b))) {
                let slides = Slides { image: image.clone(), first, now };
                for word in words {
                    slides.address(word);
                    slides.link(word);
                }
                for low in [0, 1, 0x8100_0000, u32::MAX] {
                    slides.low(low);
                }
            }
        }
    }

    // Most guests have one kernel, or another one at the same place: nothing is copied for them.
    #[test]
    fn nothing_is_done_where_slides_are_the_same() {
        let mut slides = slides(0x200_0000, 0x200_0000);
        let targets = Targets::default();
        assert!(!slides.differ() && matches!(slides.targets(&targets), Cow::Borrowed(_)));
        slides.enter(0x400_0000);
        assert!(slides.differ() && matches!(slides.targets(&targets), Cow::Owned(_)));
        slides.enter(0x200_0000);
        assert!(!slides.differ() && matches!(slides.exits(&[]), Cow::Borrowed(_)));
    }

    // The relay knows exits by what programs of the first kernel would write. A target that is not known must not
    // become one.
    #[test]
    fn exits_are_those_of_the_first_kernel() {
        let slides = slides(0, 0x1000_0000);
        let exit = ExitWord {
            word: 0x9100_1234,
            function: TEXT + 0x1000,
            target: 0,
            after: After::Nothing,
            is_aid: false,
        };
        let module = MODULE.wrapping_sub(0x1000_0000);
        let of_module =
            ExitWord { word: 0xc000_0010, function: module, target: TEXT + 0x40, ..exit };
        let first = ExitWord { word: 0x8100_1234, ..exit };
        let first_of_module = ExitWord { function: MODULE, ..of_module };
        assert_eq!(*slides.exits(&[exit, of_module]), [first, first_of_module]);
    }
}
