//! Containers and headers: the input as it is, or damage to the head of a whole image.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, rest)) = input.split_first() else { return };
    let images = common::images();
    match images.get(usize::from(choice)) {
        None => common::exercise(rest.to_vec()),
        Some(image) => {
            let mut image = image.clone();
            let head = image.len().min(2048);
            common::damage(&mut image[..head], 0, rest);
            common::exercise(image);
        }
    }
});
