//! Integers of C, with their types.

/// The type of an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    /// 8, 16, 32 or 64.
    pub(super) bits: u32,
    pub(super) signed: bool,
}

/// A constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number {
    /// In 64 bits, with the sign in those that its type does not have.
    pub(super) value: u64,
    pub(super) kind: Type,
}

impl Type {
    pub(super) const INT: Self = Self { bits: 32, signed: true };
    pub(super) const LONG: Self = Self { bits: 64, signed: true };
    /// What pointers are taken for, too.
    pub(super) const ULONG: Self = Self { bits: 64, signed: false };

    /// Without the sign.
    pub(super) fn value_bits(self) -> u32 {
        (self.bits - u32::from(self.signed)).clamp(1, 64)
    }

    /// What C calculates with: nothing is smaller than an int.
    pub(super) fn promoted(self) -> Self {
        if self.bits < 32 { Self::INT } else { self }
    }

    /// What C makes both of before it calculates.
    pub(super) fn common(self, other: Self) -> Self {
        let (one, other) = (self.promoted(), other.promoted());
        let bits = one.bits.max(other.bits);
        // The smaller one fits, whatever it is.
        let signed = [one, other].iter().all(|it| it.bits < bits || it.signed);
        Self { bits, signed }
    }
}

/// So many ones.
pub(super) fn ones(bits: u32) -> u64 {
    u64::MAX.checked_shr(64_u32.saturating_sub(bits)).unwrap_or(0)
}

impl Number {
    /// What fits of a value.
    pub(super) fn new(value: u64, kind: Type) -> Self {
        let low = value & ones(kind.bits);
        let negative = kind.signed && low.checked_shr(kind.bits - 1).is_some_and(|top| top != 0);
        Self { value: if negative { low | !ones(kind.bits) } else { low }, kind }
    }

    pub(super) fn truth(yes: bool) -> Self {
        Self::new(yes.into(), Type::INT)
    }

    pub(super) fn cast(self, kind: Type) -> Self {
        Self::new(self.value, kind)
    }

    pub(super) fn promoted(self) -> Self {
        self.cast(self.kind.promoted())
    }

    /// What C makes of two; none where it does not say, or nobody needs it.
    pub(super) fn calculate(self, sign: &str, other: Self) -> Option<Self> {
        if let "<<" | ">>" = sign {
            let this = self.promoted();
            let by = u32::try_from(other.value).ok().filter(|&by| by < this.kind.bits)?;
            let value = match (sign, this.kind.signed) {
                ("<<", _) => this.value << by,
                (_, true) => (this.value.cast_signed() >> by).cast_unsigned(),
                (_, false) => this.value >> by,
            };
            return Some(Self::new(value, this.kind));
        }
        let kind = self.kind.common(other.kind);
        let (one, other) = (self.cast(kind).value, other.cast(kind).value);
        let value = match sign {
            "&" => one & other,
            "|" => one | other,
            "^" => one ^ other,
            "+" => one.wrapping_add(other),
            "-" => one.wrapping_sub(other),
            "*" => one.wrapping_mul(other),
            "==" => return Some(Self::truth(one == other)),
            "!=" => return Some(Self::truth(one != other)),
            _ => return None,
        };
        Some(Self::new(value, kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calculations_are_those_of_c() {
        let int = |value: i64| Number::new(value.cast_unsigned(), Type::INT);
        let top = int(1).calculate("<<", int(31)).unwrap();
        assert_eq!(top.cast(Type::ULONG).value, 0xffff_ffff_8000_0000);
        let unsigned = Type { bits: 32, signed: false };
        assert_eq!(top.cast(unsigned).cast(Type::ULONG).value, 0x8000_0000);
        assert_eq!(int(-1).calculate(">>", int(3)), Some(int(-1)));
        assert_eq!(int(-1).calculate("==", Number::new(0xffff_ffff, unsigned)), Some(int(1)));
        assert_eq!(
            int(-1).calculate("&", Number::new(u64::MAX, Type::ULONG)).unwrap().value,
            u64::MAX
        );
        for by in [32, 33, -1, i64::MAX] {
            assert_eq!(int(1).calculate("<<", Number::new(by.cast_unsigned(), Type::LONG)), None);
        }
        assert_eq!(int(1).calculate("/", int(0)), None);
    }
}
