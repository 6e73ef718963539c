//! The block device: requests, descriptors and rings made of the input.
#[path = "../../../vmm/tests/blk/driver.rs"]
mod driver;

use std::cell::RefCell;
use std::fs;
use std::rc::Rc;

use driver::{AVAILABLE, DESCRIPTORS, Driver, FROM, HEADER, STATUS, TO, USED};
use vm_memory::{Bytes, GuestAddress};
use vmtrace::devices::virtio::blk::Disk;

const SECTORS: u64 = 2048;

struct Target {
    driver: Driver,
    image: tempfile::NamedTempFile,
    /// The same image as a disk that is only read.
    reader: Driver,
    fixed: tempfile::NamedTempFile,
}

fn image() -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new().unwrap();
    fs::write(image.path(), vec![0x5a; usize::try_from(SECTORS * 512).unwrap()]).unwrap();
    image
}

thread_local! {
    // Made once: its memory is large.
    static TARGET: Rc<RefCell<Target>> = {
        let (image, fixed) = (image(), image());
        let driver = Driver::new(Disk::open(image.path(), true).unwrap());
        let reader = Driver::new(Disk::open(fixed.path(), false).unwrap());
        Rc::new(RefCell::new(Target { driver, image, reader, fixed }))
    };
}

fn number(input: &mut &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let count = input.len().min(8);
    bytes[..count].copy_from_slice(&input[..count]);
    *input = &input[count..];
    u64::from_le_bytes(bytes)
}

/// Mostly near what a driver would say.
fn near(value: u64, usual: u64) -> u64 {
    match value >> 60 {
        0..12 => usual,
        12..15 => usual.wrapping_add(value & 0xfff).wrapping_sub(0x800),
        _ => value << 4,
    }
}

fn length(value: u64, usual: u32) -> u32 {
    u32::try_from(near(value, usual.into()) & 0xffff_ffff).unwrap()
}

fn drive(driver: &mut Driver, mut input: &[u8]) {
    while let Some((&choice, rest)) = input.split_first() {
        input = rest;
        match choice % 8 {
            0..4 => {
                let (what, place) = (number(&mut input), number(&mut input));
                let kinds = [0, 1, 4, 8, 11, 13, 2, u32::try_from(what >> 32).unwrap()];
                let kind = kinds[usize::try_from(what & 7).unwrap()];
                driver.header(HEADER, kind, near(place, place & (SECTORS - 1)));
                let header = length(number(&mut input), 16);
                let mut pieces = vec![(HEADER, header, what & 0xf00 == 0xf00)];
                for _ in 0..what >> 12 & 3 {
                    let (at, of) = (number(&mut input), number(&mut input));
                    let write = if at & 0x100 == 0 { kind == 0 } else { at & 0x200 == 0 };
                    let usual = if write { TO } else { FROM };
                    let sectors = u32::try_from(of & 0x7f).unwrap();
                    pieces.push((near(at, usual), length(of, sectors * 512), write));
                }
                if what & 0xf_0000 != 0xf_0000 {
                    pieces.push((near(number(&mut input), STATUS), 1, true));
                }
                driver.send_chain(&pieces);
            }
            4 => {
                // Ranges to discard or to clear.
                let (at, value) = (number(&mut input), number(&mut input));
                driver.memory.write_obj(value, GuestAddress(FROM + (at & 0xff))).unwrap();
            }
            5 => {
                // Any descriptor, ring entry or index.
                let (place, value) = (number(&mut input), number(&mut input));
                let area = [DESCRIPTORS, AVAILABLE, USED][usize::from(choice >> 3) % 3];
                let at = GuestAddress(area + (place & 0x1fff));
                driver.memory.write_obj(value, at).unwrap();
                driver.notify();
            }
            6 => {
                driver.offer(u16::try_from(number(&mut input) & 0x1ff).unwrap());
                driver.notify();
            }
            _ => driver.start(if choice & 0x80 == 0 { u32::MAX } else { 0 }),
        }
        while driver.next_used().is_some() {}
    }
}

/// After a reset it is as good as new.
fn check(driver: &mut Driver, writable: bool) {
    driver.start(u32::MAX);
    let end = driver.write_disk(3, &[1; 512]);
    assert_eq!((end.status, end.length), (u8::from(!writable), 1));
    let (end, data) = driver.read_disk(3, &[512]);
    assert_eq!((end.status, end.length), (0, 513));
    assert!(data == [if writable { 1 } else { 0x5a }; 512]);
    assert_eq!(driver.memory.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), 0);
}

pub(crate) fn run(input: &[u8]) {
    TARGET.with(|target| {
        let Target { driver, image, reader, fixed } = &mut *target.borrow_mut();
        drive(driver, input);
        check(driver, true);
        drive(reader, input);
        check(reader, false);
        // A disk stays as long as it is, and one that is only read as it is.
        assert_eq!(image.as_file().metadata().unwrap().len(), SECTORS * 512);
        assert!(fs::read(fixed.path()).unwrap().iter().all(|byte| *byte == 0x5a));
    });
}
