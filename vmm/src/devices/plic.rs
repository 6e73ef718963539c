//! A platform-level interrupt controller of RISC-V (riscv-plic-spec 1.0.0) for up to 63 level-triggered
//! interrupts, with one context for each hart.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Device, IrqLine, Outcome};

/// Where the external interrupts of harts end.
pub trait Harts: Send + Sync {
    /// How many harts there are.
    fn count(&self) -> usize;

    /// Raises or lowers the external interrupt of a hart. Called in the order in which that
    /// changes; must not call the controller.
    fn set(&self, hart: usize, raised: bool);
}

// Offsets of registers, each an array of 32-bit words.
const PENDING: u64 = 0x1000;
const PENDING_END: u64 = 0x1008;
const ENABLE: u64 = 0x2000;
/// From one hart's to the next.
const ENABLE_STRIDE: u64 = 0x80;
const CONTEXT: u64 = 0x20_0000;
const CONTEXT_STRIDE: u64 = 0x1000;
/// Within a context.
const THRESHOLD: u64 = 0;
const CLAIM: u64 = 4;

/// Sources, of which 0 does not exist.
const SOURCES: usize = 64;
/// Priorities that are told apart.
const MAX_PRIORITY: u32 = 7;

/// See the module.
pub struct Plic {
    state: Mutex<State>,
    harts: Box<dyn Harts>,
}

#[derive(Default)]
struct Context {
    enabled: u64,
    threshold: u32,
    raised: bool,
}

struct State {
    priorities: [u32; SOURCES],
    /// Lines that are asserted.
    level: u64,
    /// Interrupts that wait for a hart.
    pending: u64,
    /// Interrupts that a hart has claimed and not completed.
    claimed: u64,
    contexts: Vec<Context>,
}

impl State {
    /// What a hart would be interrupted by: the highest priority first, the lowest number of these.
    fn best(&self, hart: usize) -> Option<(u32, usize)> {
        let ready = self.pending & self.contexts.get(hart)?.enabled;
        (1..SOURCES)
            .filter(|source| ready >> source & 1 != 0 && self.priorities[*source] > 0)
            .map(|source| (self.priorities[source], source))
            .max_by_key(|(priority, source)| (*priority, SOURCES - source))
    }

    fn claim(&mut self, hart: usize) -> u32 {
        let Some((_, source)) = self.best(hart) else { return 0 };
        self.pending &= !(1 << source);
        self.claimed |= 1 << source;
        u32::try_from(source).unwrap_or(0)
    }

    fn complete(&mut self, hart: usize, source: u32) {
        let Some(context) = self.contexts.get(hart) else { return };
        let bit = 1_u64.checked_shl(source).unwrap_or(0);
        if bit & context.enabled & self.claimed != 0 {
            self.claimed &= !bit;
            self.pending |= bit & self.level;
        }
    }
}

/// The word of a register, and half a 64-bit word.
fn half(word: u64, offset: u64) -> u32 {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    u32::from_le_bytes(if offset & 4 == 0 { [a, b, c, d] } else { [e, f, g, h] })
}

fn set_half(word: &mut u64, offset: u64, value: u32) {
    let shift = (offset & 4) * 8;
    *word = *word & !(0xffff_ffff << shift) | u64::from(value) << shift;
}

/// A hart's number and the rest of an offset into an array of what harts have.
fn split(offset: u64, stride: u64) -> (usize, u64) {
    (usize::try_from(offset / stride).unwrap_or(usize::MAX), offset % stride)
}

impl Plic {
    /// Length of its registers in bytes: contexts for 512 harts.
    pub const LENGTH: u64 = 0x40_0000;

    /// A controller for `harts`.
    #[must_use]
    pub fn new(harts: Box<dyn Harts>) -> Plic {
        let state = State {
            priorities: [0; SOURCES],
            level: 0,
            pending: 0,
            claimed: 0,
            contexts: Vec::new(),
        };
        Plic { state: Mutex::new(state), harts }
    }

    /// The line of interrupt `source` (1 to 63).
    #[must_use]
    pub fn line(self: &Arc<Self>, source: u32) -> PlicLine {
        PlicLine { plic: Arc::clone(self), bit: 1_u64.checked_shl(source).unwrap_or(0) & !1 }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Harts come into being after their controller.
        let count = self.harts.count();
        if state.contexts.len() < count {
            state.contexts.resize_with(count, Context::default);
        }
        state
    }

    /// Tells harts what has changed for them.
    fn update(&self, state: &mut State) {
        for hart in 0..state.contexts.len() {
            let best = state.best(hart);
            let context = &mut state.contexts[hart];
            let raised = best.is_some_and(|(priority, _)| priority > context.threshold);
            if std::mem::replace(&mut context.raised, raised) != raised {
                self.harts.set(hart, raised);
            }
        }
    }

    fn set_level(&self, bit: u64, asserted: bool) {
        let mut state = self.lock();
        if asserted {
            state.level |= bit;
            state.pending |= bit & !state.claimed;
        } else {
            state.level &= !bit;
            // What nobody has claimed yet was nothing.
            state.pending &= !bit;
        }
        self.update(&mut state);
    }

    fn read_register(&self, offset: u64) -> u32 {
        let mut state = self.lock();
        match offset {
            0..PENDING => index(offset / 4)
                .and_then(|source| state.priorities.get(source))
                .copied()
                .unwrap_or(0),
            PENDING..PENDING_END => half(state.pending, offset),
            ENABLE..CONTEXT => {
                let (hart, register) = split(offset - ENABLE, ENABLE_STRIDE);
                match state.contexts.get(hart) {
                    Some(context) if register < 8 => half(context.enabled, register),
                    _ => 0,
                }
            }
            CONTEXT.. => {
                let (hart, register) = split(offset - CONTEXT, CONTEXT_STRIDE);
                match register {
                    THRESHOLD => state.contexts.get(hart).map_or(0, |context| context.threshold),
                    CLAIM => {
                        let source = state.claim(hart);
                        self.update(&mut state);
                        source
                    }
                    _ => 0,
                }
            }
            _ => 0,
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        let mut state = self.lock();
        match offset {
            4..PENDING => {
                let source = index(offset / 4).and_then(|source| state.priorities.get_mut(source));
                if let Some(priority) = source {
                    *priority = value & MAX_PRIORITY;
                }
            }
            ENABLE..CONTEXT => {
                let (hart, register) = split(offset - ENABLE, ENABLE_STRIDE);
                match state.contexts.get_mut(hart) {
                    Some(context) if register < 8 => {
                        set_half(&mut context.enabled, register, value);
                    }
                    _ => {}
                }
            }
            CONTEXT.. => {
                let (hart, register) = split(offset - CONTEXT, CONTEXT_STRIDE);
                match (register, state.contexts.get_mut(hart)) {
                    (THRESHOLD, Some(context)) => context.threshold = value & MAX_PRIORITY,
                    (CLAIM, _) => state.complete(hart, value),
                    _ => {}
                }
            }
            _ => {}
        }
        self.update(&mut state);
    }
}

fn index(value: u64) -> Option<usize> {
    usize::try_from(value).ok()
}

impl Device for Plic {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Registers are 32 bits wide.
        if data.len() == 4 && offset.is_multiple_of(4) {
            data.copy_from_slice(&self.read_register(offset).to_le_bytes());
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Outcome {
        if let Ok(value) = <[u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            self.write_register(offset, u32::from_le_bytes(value));
        }
        Outcome::Continue
    }
}

/// An input of a [`Plic`].
pub struct PlicLine {
    plic: Arc<Plic>,
    bit: u64,
}

impl IrqLine for PlicLine {
    fn assert(&self) {
        self.plic.set_level(self.bit, true);
    }

    fn deassert(&self) {
        self.plic.set_level(self.bit, false);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Default)]
    struct Pins(Arc<Mutex<[bool; 2]>>);

    impl Harts for Pins {
        fn count(&self) -> usize {
            2
        }
        fn set(&self, hart: usize, raised: bool) {
            let pin = &mut self.0.lock().unwrap()[hart];
            assert_ne!(*pin, raised, "only changes are told");
            *pin = raised;
        }
    }

    impl Pins {
        fn get(&self) -> [bool; 2] {
            *self.0.lock().unwrap()
        }
    }

    fn plic() -> (Arc<Plic>, Pins) {
        let pins = Pins::default();
        (Arc::new(Plic::new(Box::new(pins.clone()))), pins)
    }

    fn read(plic: &Plic, offset: u64) -> u32 {
        let mut data = [0xff; 4];
        plic.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(plic: &Plic, offset: u64, value: u32) {
        assert_eq!(plic.write(offset, &value.to_le_bytes()), Outcome::Continue);
    }

    const CLAIM_1: u64 = CONTEXT + CONTEXT_STRIDE + CLAIM;

    /// Source 3 enabled for hart 1.
    fn ready() -> (Arc<Plic>, Pins, PlicLine) {
        let (plic, pins) = plic();
        let line = plic.line(3);
        write(&plic, 12, 1);
        write(&plic, ENABLE + ENABLE_STRIDE, 1 << 3);
        (plic, pins, line)
    }

    #[test]
    fn an_interrupt_goes_to_its_hart_until_the_line_is_low() {
        let (plic, pins, line) = ready();
        line.assert();
        assert_eq!((pins.get(), read(&plic, PENDING)), ([false, true], 8));
        assert_eq!(read(&plic, CONTEXT + CLAIM), 0, "not hart 0's");
        assert_eq!(read(&plic, CLAIM_1), 3);
        assert_eq!((pins.get(), read(&plic, CLAIM_1)), ([false, false], 0));
        // Completed with the line still high, it comes again.
        write(&plic, CLAIM_1, 3);
        assert!(pins.get()[1]);
        assert_eq!(read(&plic, CLAIM_1), 3);
        line.deassert();
        write(&plic, CLAIM_1, 3);
        assert_eq!((pins.get(), read(&plic, CLAIM_1)), ([false, false], 0));
        // One that went away unclaimed was nothing.
        line.assert();
        line.deassert();
        assert_eq!(pins.get(), [false, false]);
    }

    #[test]
    fn a_line_that_rises_again_while_claimed_is_not_lost() {
        let (plic, pins, line) = ready();
        line.assert();
        assert_eq!(read(&plic, CLAIM_1), 3);
        line.deassert();
        line.assert();
        assert!(!pins.get()[1]);
        write(&plic, CLAIM_1, 3);
        assert!(pins.get()[1]);
    }

    #[test]
    fn priorities_and_thresholds() {
        let (plic, pins) = plic();
        for (source, priority) in [(1, 2), (2, 5), (40, 5), (63, 0)] {
            write(&plic, source * 4, priority);
            plic.line(u32::try_from(source).unwrap()).assert();
        }
        write(&plic, ENABLE, u32::MAX);
        write(&plic, ENABLE + 4, u32::MAX);
        assert_eq!(read(&plic, PENDING + 4), 1 << 8 | 1 << 31);
        write(&plic, CONTEXT, 5);
        assert_eq!((read(&plic, CONTEXT), pins.get()), (5, [false; 2]));
        write(&plic, CONTEXT, 4);
        assert_eq!(pins.get(), [true, false]);
        let claimed: Vec<u32> = (0..4).map(|_| read(&plic, CONTEXT + CLAIM)).collect();
        assert_eq!(claimed, [2, 40, 1, 0]);
    }

    #[test]
    fn source_0_does_not_exist() {
        let (plic, pins) = plic();
        plic.line(0).assert();
        plic.line(64).assert();
        write(&plic, 0, 7);
        write(&plic, ENABLE, u32::MAX);
        assert_eq!((read(&plic, 0), read(&plic, PENDING), pins.get()), (0, 0, [false; 2]));
    }

    proptest! {
        // The guest drives every register, and nothing it writes may be a panic or leave a pin
        // that disagrees with the registers.
        #[test]
        fn any_driver_is_survived(
            accesses in prop::collection::vec((0..Plic::LENGTH / 4, any::<u32>(), 0..5_u8), 0..200)
        ) {
            let (plic, pins) = plic();
            for (word, value, what) in accesses {
                // Most of the range is empty: every other access goes to what is not.
                let offset = if value & 1 == 0 { word * 4 } else {
                    [0, PENDING, ENABLE, CONTEXT, CONTEXT + 4][usize::from(what)] + word % 64 * 4
                };
                match what {
                    0 => plic.line(value % 70).assert(),
                    1 => plic.line(value % 70).deassert(),
                    2 => write(&plic, offset, value),
                    3 => drop(plic.write(offset, &[1; 8])),
                    _ => drop(read(&plic, offset)),
                }
            }
            for hart in 0..2 {
                let base = CONTEXT + CONTEXT_STRIDE * hart;
                let threshold = read(&plic, base);
                let raised = pins.get()[usize::try_from(hart).unwrap()];
                let source = read(&plic, base + CLAIM);
                let priority = read(&plic, u64::from(source) * 4);
                prop_assert_eq!(raised, source != 0 && priority > threshold);
            }
        }
    }
}
