//! Symbol tables: damage to the last third of a plain image, where they are.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, rest)) = input.split_first() else { return };
    let mut image = common::images()[usize::from(choice) % common::KINDS.len()].clone();
    let first = image.len() * 2 / 3;
    common::damage(&mut image, first, rest);
    common::exercise(image);
});
