//! What an expression takes of a field: some of its bits.

use super::number::{Number, Type, ones};
use std::fmt::Write as _;

/// A field, or some bits of one: `(field & keep) >> shift`, with what C takes that for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) place: Place,
    /// Bits of the field.
    keep: u64,
    /// Below the lowest bit that is kept, or right there.
    shift: u32,
    /// The highest bit is a sign, which goes on above.
    sign: bool,
    kind: Type,
}

/// Where a number is in an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) field: String,
    /// Which one of an array.
    pub(super) index: Option<u32>,
    pub(super) kind: Type,
    /// It is shown with `0x`.
    pub(super) pointer: bool,
}

/// A number as it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    Decimal,
    /// At least so many digits.
    Digits(u32),
    Hex,
}

impl View {
    pub(super) fn new(place: Place) -> Self {
        let kind = place.kind;
        Self { place, keep: ones(kind.bits), shift: 0, sign: kind.signed, kind }
    }

    /// Up to the highest bit.
    fn len(&self) -> u32 {
        (64 - self.keep.leading_zeros()).saturating_sub(self.shift)
    }

    /// Where the lowest bit is.
    fn lowest(&self) -> u32 {
        self.keep.trailing_zeros().min(63)
    }

    /// What is above its bits is the same in every larger type.
    fn is_plain(&self) -> bool {
        !self.sign || self.kind.signed
    }

    /// It is a whole field.
    fn is_whole(&self) -> bool {
        self.keep == ones(self.place.kind.bits) && self.shift == 0
    }

    /// As C converts it.
    pub(super) fn cast(mut self, kind: Type) -> Option<Self> {
        if kind.bits > self.kind.bits && !self.is_plain() {
            return None;
        }
        if self.len() > kind.bits {
            self.keep &= ones(kind.bits).checked_shl(self.shift).unwrap_or(0);
            self.sign = false;
        }
        if self.keep == 0 {
            return None;
        }
        self.kind = kind;
        if self.len() == kind.bits {
            self.sign = kind.signed;
        }
        Some(self)
    }

    pub(super) fn promoted(self) -> Option<Self> {
        let kind = self.kind.promoted();
        self.cast(kind)
    }

    /// `self >> by`
    pub(super) fn shifted(self, by: Number) -> Option<Self> {
        let mut this = self.promoted()?;
        let by = u32::try_from(by.value).ok().filter(|&by| by < this.kind.bits)?;
        if !this.is_plain() {
            return None;
        }
        let shift = this.shift.checked_add(by).filter(|&shift| shift < 64)?;
        this.keep &= u64::MAX << shift;
        this.shift = shift;
        (this.keep != 0).then_some(this)
    }

    /// `self & mask`
    pub(super) fn masked(self, mask: Number) -> Option<Self> {
        let kind = self.kind.common(mask.kind);
        let (mut this, mask) = (self.promoted()?.cast(kind)?, mask.cast(kind).value);
        let above = ones(kind.bits) & !ones(this.len());
        if this.sign && mask & above != 0 {
            // The sign stays a sign only where all of it stays.
            if mask & above != above || mask & ones(this.len()) != ones(this.len()) {
                return None;
            }
            return Some(this);
        }
        this.keep &= mask.checked_shl(this.shift)?;
        if this.keep == 0 {
            return None;
        }
        this.sign = kind.signed && this.len() == kind.bits;
        Some(this)
    }

    /// What it is compared with as C does.
    pub(super) fn compared(self, number: Number) -> Option<(Self, u64)> {
        let kind = self.kind.common(number.kind);
        Some((self.promoted()?.cast(kind)?, number.cast(kind).value))
    }

    /// As it is passed to a function that takes an `unsigned long`: what that has of another number.
    pub(super) fn passed(self) -> Option<Self> {
        self.promoted()?.cast(Type::ULONG)
    }

    /// Whether both are of the same bits, and mean the same where they are not 0.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.has_bits_of(other) && self.sign == other.sign
    }

    /// Whether one is 0 where the other is.
    pub(super) fn has_bits_of(&self, other: &Self) -> bool {
        (&self.place, self.keep, self.shift) == (&other.place, other.keep, other.shift)
    }

    /// All of its bits are 64.
    pub(super) fn is_long(&self) -> bool {
        self.is_whole() && self.place.kind.bits == 64 && self.place.index.is_none()
    }

    /// What stands before a form so that it is about these bits; and how far the numbers of the form are to be
    /// shifted for that. None if they are no run of bits, or one with a sign.
    pub(super) fn before(&self) -> Option<(String, u32)> {
        if self.is_whole() && self.sign == self.place.kind.signed {
            return Some((String::new(), 0));
        }
        let lowest = self.lowest();
        let run = self.keep >> lowest;
        if self.sign || run & run.wrapping_add(1) != 0 {
            return None;
        }
        Some((format!("bits {lowest} {} ", run.count_ones()), lowest - self.shift.min(lowest)))
    }

    /// Bits of the field.
    pub(super) fn keep(&self) -> u64 {
        self.keep
    }

    /// How many bits of the field are left out at its lower end.
    pub(super) fn shift(&self) -> u32 {
        self.shift
    }

    /// The form of a number that a conversion of this type prints.
    pub(super) fn number(self, kind: Type, base: Base) -> Option<String> {
        let this = self.promoted()?;
        // A smaller one is converted to an int before.
        let this = this.cast(kind)?.promoted()?;
        let place = &this.place;
        let mut form = match base {
            Base::Decimal => String::new(),
            Base::Digits(digits) => format!("0{digits}"),
            Base::Hex => "x".to_owned(),
        };
        if this.is_whole() && this.sign == place.kind.signed {
            let fits = match base {
                // Readers print the sign in all 64 bits.
                Base::Hex => !this.sign || this.kind.bits == 64,
                Base::Decimal | Base::Digits(_) => this.is_plain(),
            };
            if base == Base::Decimal && place.pointer {
                form = "bits 0 64".to_owned();
            }
            return fits.then_some(form);
        }
        let lowest = this.lowest();
        let run = this.keep >> lowest;
        if run & run.wrapping_add(1) != 0 || this.shift != lowest {
            return None;
        }
        let mut bits = format!("bits {lowest} {}", run.count_ones());
        match (this.sign, base) {
            (false, Base::Decimal) => {}
            (false, _) => {
                let _ = write!(bits, " {form}");
            }
            (true, Base::Decimal) if this.is_plain() => bits.push_str(" signed"),
            (true, _) => return None,
        }
        Some(bits)
    }

    /// The form of a pointer with all of its digits.
    pub(super) fn pointer(self) -> Option<&'static str> {
        let this = self.cast(Type::ULONG)?;
        (this.is_whole() && this.sign == this.place.kind.signed).then_some("p")
    }
}
