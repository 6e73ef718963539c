//! Writes numbers into lines of text.

use std::io::Write as _;

/// Appends `width` spaces.
#[inline]
pub(super) fn pad(out: &mut Vec<u8>, width: usize) {
    const FEW: usize = 32;
    let end = out.len() + width;
    if width <= FEW {
        // A length that is known takes no call.
        out.extend_from_slice(&[b' '; FEW]);
        out.truncate(end);
    } else {
        out.resize(end, b' ');
    }
}

/// All numbers of two digits.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[b'0'; 2]; 100];
    let mut number = 0;
    while number < 100 {
        pairs[number as usize] = [b'0' + number / 10, b'0' + number % 10];
        number += 1;
    }
    pairs
};

/// The last two digits of a number.
#[inline]
fn pair(number: u64) -> [u8; 2] {
    usize::try_from(number % 100)
        .ok()
        .and_then(|number| PAIRS.get(number))
        .copied()
        .unwrap_or([b'0'; 2])
}

/// The last six digits of a number.
#[inline]
pub(super) fn six(number: u64) -> [u8; 6] {
    let ([a, b], [c, d], [e, f]) = (pair(number / 10_000), pair(number / 100), pair(number));
    [a, b, c, d, e, f]
}

/// The last eight digits of a number. No pair waits for another one.
#[inline]
fn eight(number: u64) -> [u8; 8] {
    let (high, low) = (number / 10_000, number % 10_000);
    let ([a, b], [c, d]) = (pair(high / 100), pair(high));
    let ([e, f], [g, h]) = (pair(low / 100), pair(low));
    [a, b, c, d, e, f, g, h]
}

/// Most digits of a number.
const MOST: usize = 20;

/// Writes the last digits of a number, as many as there is room for.
#[inline]
fn fill_in(mut number: u64, room: &mut [u8]) {
    let mut eights = room.rchunks_exact_mut(8);
    for last in eights.by_ref() {
        last.copy_from_slice(&eight(number));
        number /= 100_000_000;
    }
    let mut pairs = eights.into_remainder().rchunks_exact_mut(2);
    for last in pairs.by_ref() {
        last.copy_from_slice(&pair(number));
        number /= 100;
    }
    if let Some(first) = pairs.into_remainder().first_mut() {
        *first = pair(number)[1];
    }
}

/// How many digits a number has.
#[inline]
fn count(number: u64) -> usize {
    usize::try_from(number.checked_ilog10().unwrap_or(0) + 1).unwrap_or(MOST)
}

/// The digits of a number, at the end of bytes that are `fill` before them, and where they begin.
pub(super) fn digits(number: u64, fill: u8) -> ([u8; MOST], usize) {
    let (mut digits, start) = ([fill; MOST], MOST - count(number));
    fill_in(number, &mut digits[start..]);
    (digits, start)
}

/// Writes a number, filled from the left to `width`; returns its length.
#[inline]
pub(crate) fn decimal(out: &mut Vec<u8>, number: u64, width: usize, fill: u8) -> usize {
    if number < 10 && width <= 1 {
        out.push(pair(number)[1]);
        return 1;
    }
    let length = count(number);
    let shown = length.max(width.min(MOST));
    // In their place at once: a processor waits when it copies bytes that were written two by two.
    let end = out.len() + shown;
    out.extend_from_slice(&[fill; MOST]);
    out.truncate(end);
    fill_in(number, out.get_mut(end - length..).unwrap_or_default());
    shown
}

/// Writes a number as `0x` and its digits.
pub(super) fn hexadecimal(out: &mut Vec<u8>, number: u64) {
    // A vector takes all.
    let _ = write!(out, "{number:#x}");
}

#[cfg(test)]
mod tests {
    use super::*;

    // Times, pids and counts of all formats are written by this.
    #[test]
    fn numbers_are_written_as_they_are() {
        let few = (0..12_345).chain((0..64).flat_map(|bits| {
            let power = 1_u64 << bits;
            [power - 1, power, power + 1, u64::MAX >> bits]
        }));
        let tens = (0..20).map(|zeros| 10_u64.pow(zeros)).flat_map(|ten| [ten - 1, ten, ten + 1]);
        for number in few.chain(tens) {
            let (all, start) = digits(number, b'*');
            assert_eq!(all[start..], *number.to_string().as_bytes());
            assert!(all[..start].iter().all(|byte| *byte == b'*'), "{number}");
            for width in [0, 1, 5, 20, 99] {
                let mut out = b"=".to_vec();
                let length = decimal(&mut out, number, width, b'*');
                let expected = format!("={number:*>width$}", width = width.min(20));
                assert_eq!((out, length), (expected.clone().into_bytes(), expected.len() - 1));
            }
            assert_eq!(six(number), *format!("{:06}", number % 1_000_000).as_bytes());
        }
    }
}
