//! Patterns for function names, with the rules of the kernel's `set_ftrace_filter`.

/// Whether the whole of `text` matches: `*` is any text, `?` any one character, `[a-z]` a class
/// and `[!a-z]` its opposite, `\` takes the next character as it is. A `[` that is never closed
/// stands for itself.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on when what follows the last star does not fit: one character further.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            retry = Some((p, t));
            continue;
        }
        let next = match text.get(t) {
            None if p == pattern.len() => return true,
            None => None,
            Some(&c) => one(&pattern[p..], c),
        };
        match (next, retry) {
            (Some(used), _) => {
                p += used;
                t += 1;
            }
            // A later star makes any earlier one's choice final: no need to go further back.
            (None, Some((after, start))) if start < text.len() => {
                (p, t) = (after, start + 1);
                retry = Some((p, t));
            }
            _ => return false,
        }
    }
}

/// Whether the first element of a pattern matches a character, and how long that element is.
fn one(pattern: &[u8], c: u8) -> Option<usize> {
    match *pattern {
        [b'?', ..] => Some(1),
        [b'[', ref rest @ ..] => match class(rest, c) {
            Some((true, len)) => Some(1 + len),
            Some((false, _)) => None,
            None => (c == b'[').then_some(1),
        },
        [b'\\', literal, ..] => (c == literal).then_some(2),
        [literal, ..] => (c == literal).then_some(1),
        [] => None,
    }
}

/// Whether `c` is in the class that `rest` begins with, and its length with the closing bracket.
fn class(rest: &[u8], c: u8) -> Option<(bool, usize)> {
    let inverted = rest.first() == Some(&b'!');
    let mut i = usize::from(inverted);
    let mut found = false;
    // A bracket in the first place does not close the class.
    let first = i;
    loop {
        let low = *rest.get(i)?;
        if low == b']' && i > first {
            return Some((found != inverted, i + 1));
        }
        i += 1;
        let mut high = low;
        if rest.get(i) == Some(&b'-') && rest.get(i + 1).is_some_and(|&h| h != b']') {
            high = rest[i + 1];
            i += 2;
        }
        found |= (low..=high).contains(&c);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_match_as_in_set_ftrace_filter() {
        for (pattern, text, expected) in [
            ("vfs_read", "vfs_read", true),
            ("vfs_read", "vfs_readv", false),
            ("vfs_*", "vfs_read", true),
            ("vfs_*", "vfs_", true),
            ("vfs_*", "xvfs_read", false),
            ("*lock", "mutex_lock", true),
            ("*lock", "mutex_lock_nested", false),
            ("*lock*", "mutex_lock_nested", true),
            ("*a*b*c", "xaxbxbxc", true),
            ("*a*b*c", "xaxbxbxcx", false),
            ("?fs_*d", "vfs_read", true),
            ("[uv]fs_read", "vfs_read", true),
            ("[!uv]fs_read", "vfs_read", false),
            ("[a-f]oo.isra.?", "foo.isra.0", true),
            ("[]x]y", "]y", true),
            ("[oops", "[oops", true),
            ("a\\*b", "a*b", true),
            ("a\\*b", "axb", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("**", "a", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    proptest! {
        #[test]
        fn stars_and_marks_agree_with_a_slow_matcher(
            pattern in "[ab*?]{0,8}",
            text in "[ab]{0,10}",
        ) {
            fn slow(p: &[u8], t: &[u8]) -> bool {
                match p {
                    [] => t.is_empty(),
                    [b'*', p @ ..] => (0..=t.len()).any(|i| slow(p, &t[i..])),
                    [c, p @ ..] => t.first().is_some_and(|x| *c == b'?' || c == x) && slow(p, &t[1..]),
                }
            }
            prop_assert_eq!(matches(&pattern, &text), slow(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn no_pattern_panics(pattern in "\\PC{0,12}", text in "\\PC{0,12}") {
            matches(&pattern, &text);
        }
    }
}
