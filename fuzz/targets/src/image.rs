//! Containers and headers of images: the input itself, or a valid image whose head the input
//! damages.

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let images = crate::kernels::images();
    match images.get(usize::from(choice)) {
        None => crate::kernels::exercise(rest.to_vec()),
        Some(image) => {
            let mut image = image.clone();
            let head = image.len().min(2048);
            crate::kernels::damage(&mut image[..head], 0, rest);
            crate::kernels::exercise(image);
        }
    }
}
