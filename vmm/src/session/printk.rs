//! What the kernel's `vscnprintf` makes of a format, as far as it takes no knowledge of the
//! kernel's structures.

/// A text is never longer: `panic` has a buffer of so many bytes (kernel/panic.c).
const MOST: usize = 1024;
/// The longest string that is looked at.
const STRING: usize = 256;

/// Where arguments come from. The guest's words: nothing is trusted.
pub(super) trait Arguments {
    /// The next one, as it lies in a register or on the stack; `None`: it is not known.
    fn next(&mut self) -> Option<u64>;
    /// What is at an address up to a zero byte, at most `most` bytes; `None`: nothing is mapped.
    fn string(&self, address: u64, most: usize) -> Option<Vec<u8>>;
}

/// The text of `format`, one line without control characters. What cannot be told is shown as the
/// conversion itself.
pub(super) fn format(format: &[u8], arguments: &mut dyn Arguments) -> String {
    let mut out = Vec::new();
    let mut rest = format;
    while let Some((&byte, behind)) = rest.split_first() {
        if out.len() >= MOST {
            break;
        }
        rest = behind;
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let (conversion, length) = Conversion::parse(behind, arguments);
        let (this, behind) = behind.split_at(length);
        rest = behind;
        match conversion.and_then(|conversion| conversion.show(arguments)) {
            Some(text) => out.extend(text),
            None => {
                out.push(b'%');
                out.extend(this);
            }
        }
    }
    out.truncate(MOST);
    let text = String::from_utf8_lossy(&out);
    text.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// `%[flags][width][.precision][length]kind`
#[derive(Default)]
struct Conversion {
    kind: u8,
    minus: bool,
    plus: bool,
    space: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
    /// Of an integer, bytes.
    size: u32,
}

impl Conversion {
    /// What follows a `%`, and how many bytes that is.
    fn parse(text: &[u8], arguments: &mut dyn Arguments) -> (Option<Self>, usize) {
        let mut this = Self { size: 4, ..Self::default() };
        let mut at = 0;
        let peek = |at: usize| text.get(at).copied().unwrap_or(0);
        loop {
            match peek(at) {
                b'-' => this.minus = true,
                b'+' => this.plus = true,
                b' ' => this.space = true,
                b'0' => this.zero = true,
                b'#' => this.alternate = true,
                _ => break,
            }
            at += 1;
        }
        let mut number = |at: &mut usize| -> Option<usize> {
            if peek(*at) == b'*' {
                *at += 1;
                return arguments.next().and_then(|word| usize::try_from(word).ok());
            }
            let mut number = 0_usize;
            while let digit @ b'0'..=b'9' = peek(*at) {
                number = number.saturating_mul(10).saturating_add(usize::from(digit - b'0'));
                *at += 1;
            }
            Some(number)
        };
        this.width = number(&mut at).unwrap_or(0).min(MOST);
        if peek(at) == b'.' {
            at += 1;
            this.precision = number(&mut at).map(|number| number.min(MOST));
        }
        loop {
            match peek(at) {
                b'h' => this.size /= 2,
                b'l' | b'z' | b't' | b'L' | b'j' => this.size = 8,
                _ => break,
            }
            at += 1;
        }
        this.kind = peek(at);
        if this.kind == 0 {
            return (None, at);
        }
        at += 1;
        if this.kind == b'p' {
            // Which kind of pointer takes letters.
            while peek(at).is_ascii_alphanumeric() {
                at += 1;
            }
        }
        (Some(this), at)
    }

    fn show(&self, arguments: &mut dyn Arguments) -> Option<Vec<u8>> {
        let text = match self.kind {
            b'%' => return Some(b"%".to_vec()),
            b'c' => vec![arguments.next()?.to_le_bytes()[0]],
            b's' => {
                let address = arguments.next()?;
                let most = self.precision.unwrap_or(STRING).min(STRING);
                match address {
                    0 => b"(null)".to_vec(),
                    address => arguments.string(address, most)?,
                }
            }
            b'd' | b'i' => {
                let shift = 64 - 8 * self.size.clamp(1, 8);
                let value = arguments.next()?.cast_signed() << shift >> shift;
                let sign = match value {
                    ..0 => "-",
                    _ if self.plus => "+",
                    _ if self.space => " ",
                    _ => "",
                };
                return Some(self.integer(sign, &value.unsigned_abs().to_string()));
            }
            b'u' => return Some(self.integer("", &self.unsigned(arguments)?.to_string())),
            b'o' => return Some(self.integer("", &format!("{:o}", self.unsigned(arguments)?))),
            b'x' | b'X' => {
                let value = self.unsigned(arguments)?;
                let prefix = if self.alternate { "0x" } else { "" };
                let digits =
                    if self.kind == b'x' { format!("{value:x}") } else { format!("{value:X}") };
                return Some(self.integer(prefix, &digits));
            }
            // As `%px`: what else the kernel would say of it takes its structures.
            b'p' => format!("{:#x}", arguments.next()?).into_bytes(),
            _ => return None,
        };
        Some(self.padded(text))
    }

    fn unsigned(&self, arguments: &mut dyn Arguments) -> Option<u64> {
        let shift = 64 - 8 * self.size.clamp(1, 8);
        Some(arguments.next()? << shift >> shift)
    }

    fn integer(&self, prefix: &str, digits: &str) -> Vec<u8> {
        let least = match self.precision {
            Some(precision) => precision,
            None if self.zero && !self.minus => self.width.saturating_sub(prefix.len()),
            None => 0,
        };
        self.padded(format!("{prefix}{digits:0>least$}").into_bytes())
    }

    fn padded(&self, mut text: Vec<u8>) -> Vec<u8> {
        let missing = self.width.saturating_sub(text.len());
        if self.minus {
            text.resize(text.len() + missing, b' ');
        } else {
            text.splice(0..0, std::iter::repeat_n(b' ', missing));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Words<'a>(std::slice::Iter<'a, u64>);

    impl Arguments for Words<'_> {
        fn next(&mut self) -> Option<u64> {
            self.0.next().copied()
        }

        fn string(&self, address: u64, most: usize) -> Option<Vec<u8>> {
            let text: &[u8] = match address {
                1 => b"init",
                2 => b"\x1b[2Jescape\nline\xff",
                _ => return None,
            };
            Some(text[..text.len().min(most)].to_vec())
        }
    }

    fn text(of: &str, words: &[u64]) -> String {
        format(of.as_bytes(), &mut Words(words.iter()))
    }

    // Those that kernels have (`git grep -h 'panic("'`).
    #[test]
    fn formats_of_panics() {
        assert_eq!(text("sysrq triggered crash\n", &[]), "sysrq triggered crash");
        let init = "Attempted to kill init! exitcode=0x%08x\n";
        assert_eq!(
            text(init, &[0xffff_ffff_0000_000b]),
            "Attempted to kill init! exitcode=0x0000000b"
        );
        assert_eq!(text("%s: %s\n", &[1, 1]), "init: init");
        assert_eq!(
            text("%d %i %+d [%5d|%-5d|%05d]", &[!0, 7, 7, 42, 42, 42]),
            "-1 7 +7 [   42|42   |00042]"
        );
        assert_eq!(
            text("%lx %#lx %u %hhu %llu", &[255, 255, 1 << 32 | 9, 0x1ff, !0]),
            "ff 0xff 9 255 18446744073709551615"
        );
        assert_eq!(text("100%% at %pS, %c%.2s", &[0x1000, 65, 1]), "100% at 0x1000, Ain");
        assert_eq!(text("%*d", &[4, 7]), "   7");
        assert_eq!(text("[%s]", &[0]), "[(null)]");
    }

    // The guest may be hostile, or so broken that its own words are nonsense.
    #[test]
    fn what_cannot_be_told_is_shown_as_it_is() {
        assert_eq!(text("%s and %d", &[99]), "%s and %d");
        assert_eq!(text("%s %08x", &[1]), "init %08x");
        assert_eq!(text("%", &[]), "%");
        assert_eq!(text("%l", &[]), "%l");
        assert_eq!(text("%y", &[1]), "%y");
        assert_eq!(text("%s", &[2]), "?[2Jescape?line\u{fffd}");
        assert!(text("%999999999d", &[1]).len() <= MOST);
        assert!(text(&"%s".repeat(2000), &[1; 2000]).len() <= MOST);
    }

    proptest! {
        #[test]
        fn anything_gives_a_bounded_line(of in prop::collection::vec(any::<u8>(), 0..2000), words in prop::collection::vec(any::<u64>(), 0..20)) {
            let text = format(&of, &mut Words(words.iter()));
            // A byte that is no UTF-8 becomes three.
            prop_assert!(text.len() <= 3 * MOST && !text.chars().any(char::is_control));
        }
    }
}
