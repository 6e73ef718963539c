//! Numbers and names of tasks as people write them in conditions.

/// Bytes of a task's name (`TASK_COMM_LEN`), with the NUL at its end.
const COMM: usize = 16;

/// 42, -1, 0x1f, 4K.
pub(super) fn number(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let (number, unit) = if let Some(hex) = digits.strip_prefix("0x") {
        (i128::from(u64::from_str_radix(hex, 16).ok().filter(|_| !hex.starts_with('+'))?), 1)
    } else {
        let (digits, unit) = match digits.char_indices().last()? {
            (at, 'K') => (&digits[..at], 1 << 10),
            (at, 'M') => (&digits[..at], 1 << 20),
            (at, 'G') => (&digits[..at], 1 << 30),
            _ => (digits, 1),
        };
        // What Rust parses may have a sign of its own.
        let good = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        (i128::from(digits.parse::<u64>().ok().filter(|_| good)?), unit)
    };
    Some(if negative { -number * unit } else { number * unit })
}

/// What a task's name has to begin with, or be.
pub(super) fn comm(pattern: &str) -> Result<Vec<Option<u8>>, String> {
    let (front, open) = match pattern.strip_suffix('*') {
        Some(front) => (front, true),
        None => (pattern, false),
    };
    if let Some(odd) = front.chars().find(|c| matches!(c, '*' | '[' | ']' | '\\')) {
        return Err(format!(
            "{odd:?} in a task's name: use the name, with ? for any character and * at its end"
        ));
    }
    if front.len() >= COMM {
        return Err(format!("{pattern:?} is too long: a task's name has at most 15 bytes"));
    }
    let mut bytes: Vec<_> = front.bytes().map(|byte| (byte != b'?').then_some(byte)).collect();
    if !open {
        bytes.push(Some(0));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_c_with_units() {
        let all = [
            ("0", Some(0)),
            ("42", Some(42)),
            ("-1", Some(-1)),
            ("0x1f", Some(31)),
            ("-0x10", Some(-16)),
            ("4K", Some(4096)),
            ("2G", Some(2 << 30)),
            ("0xffffffffffffffff", Some(i128::from(u64::MAX))),
        ];
        for (text, expected) in all {
            assert_eq!(number(text), expected, "{text}");
        }
        for bad in
            ["", "-", "x", "1x", "+1", "--1", "0x", "0x+1", "K", "1.5", "18446744073709551616"]
        {
            assert_eq!(number(bad), None, "{bad}");
        }
    }

    #[test]
    fn names_of_tasks_have_an_end_unless_a_star_leaves_it_open() {
        assert_eq!(comm("a?"), Ok(vec![Some(b'a'), None, Some(0)]));
        assert_eq!(comm("ab*"), Ok(vec![Some(b'a'), Some(b'b')]));
        assert_eq!(comm("*"), Ok(vec![]));
        assert_eq!(comm("123456789012345").unwrap().len(), 16);
        for bad in ["1234567890123456", "*a", "[ab]", "a\\*"] {
            assert!(comm(bad).is_err(), "{bad}");
        }
    }
}
