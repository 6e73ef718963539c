//! Writes numbers into lines of text.

use std::io::Write as _;

/// Appends `width` spaces.
pub(super) fn pad(out: &mut Vec<u8>, width: usize) {
    out.resize(out.len() + width, b' ');
}

/// The digits of a number, at the end of bytes that are `fill` before them, and where they begin.
pub(crate) fn digits(mut number: u64, fill: u8) -> ([u8; 20], usize) {
    let mut digits = [fill; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            return (digits, start);
        }
    }
}

/// Writes a number, filled from the left to `width`; returns its length.
pub(super) fn decimal(out: &mut Vec<u8>, number: u64, width: usize, fill: u8) -> usize {
    let (digits, start) = digits(number, fill);
    let length = digits.len() - start;
    let shown = length.max(width.min(digits.len()));
    out.extend_from_slice(&digits[digits.len() - shown..]);
    shown
}

/// Writes a number as `0x` and its digits.
pub(super) fn hexadecimal(out: &mut Vec<u8>, number: u64) {
    // A vector takes all.
    let _ = write!(out, "{number:#x}");
}
