//! Exits of functions: damage to code and to the tables that tell of it.
#![no_main]

mod common;

use common::synthetic::code::everything;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, rest)) = input.split_first() else { return };
    let (image, code, tables) = everything();
    let mut image = image.clone();
    match choice % 3 {
        0 => common::damage(&mut image[..4096 + code], 4096, rest),
        1 => common::damage(&mut image[..tables.end], tables.start, rest),
        _ => common::damage(&mut image, 0, rest),
    }
    common::exercise(image);
});
