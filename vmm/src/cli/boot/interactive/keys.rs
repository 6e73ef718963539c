//! Keys: the escape sequences that are not for the guest, and the transport of the others into an
//! emulated host.

/// Ctrl-].
const ESCAPE: u8 = 0x1d;

/// What begins a message among keys on their way into an emulated host; twice, it is a key.
const MARK: u8 = 0xff;
/// Behind it: rows and columns, big endian.
const SIZE: u8 = b's';

/// Of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli::boot) struct Size {
    pub(in crate::cli::boot) rows: u16,
    pub(in crate::cli::boot) columns: u16,
}

/// What was typed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::cli::boot) struct Typed {
    /// For the guest.
    pub(in crate::cli::boot) keys: Vec<u8>,
    /// The run is to end, so many times.
    pub(in crate::cli::boot) ends: usize,
    /// The user asks for help.
    pub(in crate::cli::boot) help: bool,
    /// The terminal has another size.
    pub(in crate::cli::boot) size: Option<Size>,
}

/// Takes what was typed, in pieces of any size.
pub(in crate::cli::boot) trait Keys: Send {
    fn take(&mut self, bytes: &[u8]) -> Typed;
}

/// Every byte is a key for the guest.
pub(in crate::cli::boot) struct Plain;

impl Keys for Plain {
    fn take(&mut self, bytes: &[u8]) -> Typed {
        Typed { keys: bytes.to_vec(), ..Typed::default() }
    }
}

/// A user's keys: the one behind the escape key is for vmtrace.
#[derive(Debug, Default)]
pub(in crate::cli::boot) struct Escape {
    /// It was the last key.
    escaped: bool,
}

impl Keys for Escape {
    fn take(&mut self, bytes: &[u8]) -> Typed {
        let mut typed = Typed::default();
        for &key in bytes {
            match (std::mem::take(&mut self.escaped), key) {
                (false, ESCAPE) => self.escaped = true,
                (false, key) | (true, key @ ESCAPE) => typed.keys.push(key),
                (true, b'q') => typed.ends += 1,
                (true, b'?') => typed.help = true,
                // Not meant for vmtrace: editors have a use for the escape key.
                (true, key) => typed.keys.extend([ESCAPE, key]),
            }
        }
        typed
    }
}

/// Keys and sizes as [`encode_keys`] and [`Size::encode`] have them.
#[derive(Debug, Default)]
pub(in crate::cli::boot) struct Decoder {
    /// A message whose end has not come.
    message: Vec<u8>,
}

impl Keys for Decoder {
    fn take(&mut self, bytes: &[u8]) -> Typed {
        let mut typed = Typed::default();
        for &byte in bytes {
            self.message.push(byte);
            match *self.message.as_slice() {
                [MARK, MARK] => typed.keys.push(MARK),
                [MARK, SIZE, r, ows, c, olumns] => {
                    let rows = u16::from_be_bytes([r, ows]);
                    typed.size = Some(Size { rows, columns: u16::from_be_bytes([c, olumns]) });
                }
                [MARK] | [MARK, SIZE, ..] => continue,
                // Nobody sends others.
                [MARK, ..] => {}
                _ => typed.keys.push(byte),
            }
            self.message.clear();
        }
        typed
    }
}

/// Keys as [`Decoder`] wants them.
pub(super) fn encode_keys(keys: &[u8]) -> impl Iterator<Item = u8> + '_ {
    keys.iter().flat_map(|&key| std::iter::repeat_n(key, if key == MARK { 2 } else { 1 }))
}

impl Size {
    /// As [`Decoder`] wants it.
    pub(super) fn encode(self) -> impl Iterator<Item = u8> {
        let size = self.rows.to_be_bytes().into_iter().chain(self.columns.to_be_bytes());
        [MARK, SIZE].into_iter().chain(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(keys: &[u8]) -> Typed {
        Typed { keys: keys.to_vec(), ..Typed::default() }
    }

    #[test]
    fn the_key_behind_the_escape_key_is_for_vmtrace() {
        let take = |bytes: &[u8]| Escape::default().take(bytes);
        assert_eq!(take(b"ls\r\x03\x04\x1b[A\xff\0"), keys(b"ls\r\x03\x04\x1b[A\xff\0"));
        assert_eq!(take(b"a\x1dqb"), Typed { ends: 1, ..keys(b"ab") });
        assert_eq!(take(b"\x1dq\x1dq\x1dq"), Typed { ends: 3, ..keys(b"") });
        assert_eq!(take(b"\x1d?x"), Typed { help: true, ..keys(b"x") });
        // Twice it is a key itself, and what comes behind that is nothing special.
        assert_eq!(take(b"\x1d\x1dq"), keys(b"\x1dq"));
        assert_eq!(take(b"\x1d\x1d\x1d\x1d"), keys(b"\x1d\x1d"));
        // A user of vi means vi.
        assert_eq!(take(b"\x1djq"), keys(b"\x1djq"));
        assert_eq!(take(b"q?"), keys(b"q?"));
    }

    #[test]
    fn the_escape_key_may_be_typed_slowly() {
        let mut escape = Escape::default();
        assert_eq!(escape.take(b"a\x1d"), keys(b"a"));
        assert_eq!(escape.take(b""), keys(b""));
        assert_eq!(escape.take(b"q"), Typed { ends: 1, ..keys(b"") });
        assert_eq!(escape.take(b"q"), keys(b"q"));
    }

    proptest! {
        #[test]
        fn keys_and_sizes_get_into_a_host_as_they_are(
            typed in prop::collection::vec(any::<u8>().prop_map(|key| key | 0xf0), 0..40),
            rows: u16, columns: u16, cut in any::<prop::sample::Index>(),
        ) {
            let size = Size { rows, columns };
            let mut sent: Vec<u8> = encode_keys(&typed).collect();
            sent.extend(size.encode());
            sent.extend(encode_keys(&typed));
            let (first, second) = sent.split_at(cut.index(sent.len()));
            let mut decoder = Decoder::default();
            let (first, second) = (decoder.take(first), decoder.take(second));
            prop_assert_eq!([first.keys, second.keys].concat(), [&typed[..], &typed[..]].concat());
            prop_assert_eq!(first.size.or(second.size), Some(size));
        }

        // Nobody but vmtrace itself writes there, and a fault of its must not be a panic.
        #[test]
        fn nonsense_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            let typed = decoder.take(&bytes);
            prop_assert!(typed.keys.len() <= bytes.len() && decoder.message.len() < 6);
        }
    }
}
