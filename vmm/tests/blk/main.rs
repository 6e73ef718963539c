//! Tests of the block device, which play the driver.

mod driver;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driver::*;
use vm_memory::{Bytes, GuestAddress};
use vmtrace::devices::virtio::blk::Disk;

const SECTORS: u64 = 4096;
const OK: u8 = 0;
const ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const F_RO: u32 = 1 << 5;
const F_FLUSH: u32 = 1 << 9;
const F_DISCARD: u32 = 1 << 13;
const F_WRITE_ZEROES: u32 = 1 << 14;

/// An image whose every byte tells where it is.
fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), content()).unwrap();
    file
}

fn content() -> Vec<u8> {
    (0..SECTORS * 512).map(|at| (at / 512 * 7 + at % 251).to_le_bytes()[0]).collect()
}

fn disk(path: &Path, writable: bool) -> Driver {
    Driver::new(Disk::open(path, writable).unwrap())
}

fn ok(length: u32) -> End {
    End { status: OK, length }
}

fn ends(status: u8) -> End {
    End { status, length: 1 }
}

#[test]
fn the_driver_learns_what_the_disk_is() {
    let file = image();
    let guest = disk(file.path(), true);
    assert_eq!(u64::from_le_bytes(guest.config(0)), SECTORS);
    assert_eq!(u32::from_le_bytes(guest.config(12)), 254, "segments");
    assert_eq!(u32::from_le_bytes(guest.config(20)), 512, "block size");
    assert_eq!(u32::from_le_bytes(guest.config(52)), 16, "ranges");
    let all = F_RO | F_FLUSH | F_DISCARD | F_WRITE_ZEROES;
    // File systems for temporary files can all make holes.
    assert_eq!(guest.features() & all, F_FLUSH | F_DISCARD | F_WRITE_ZEROES);
    drop(guest);
    assert_eq!(disk(file.path(), false).features() & all, F_RO);
}

#[test]
fn what_is_read_is_what_is_there() {
    let file = image();
    let mut guest = disk(file.path(), false);
    let all = content();
    for (sector, pieces) in [
        (0, &[512][..]),
        (5, &[4096]),
        (9, &[1, 511]),
        (100, &[3, 1000, 21, 1024]),
        // More than is moved at once, and all there is.
        (1, &[300_000, 500_000, 224_000]),
        (0, &[1 << 20, 1 << 20]),
        (SECTORS - 1, &[512]),
    ] {
        let (end, data) = guest.read_disk(sector, pieces);
        let length: u32 = pieces.iter().sum();
        assert_eq!(end, ok(length + 1), "{sector} {pieces:?}");
        let at = usize::try_from(sector * 512).unwrap();
        assert!(data == all[at..at + data.len()], "{sector} {pieces:?}");
    }
    assert_eq!(guest.interrupts(), 7);
}

// A header may be cut anywhere, and a status share its descriptor with data.
#[test]
fn no_framing_is_assumed() {
    let file = image();
    let mut guest = disk(file.path(), true);
    guest.header(HEADER, OUT, 3);
    guest.memory.write_slice(&[0x5a; 512], GuestAddress(FROM)).unwrap();
    let pieces =
        [(HEADER, 5, false), (HEADER + 5, 11, false), (FROM, 512, false), (STATUS, 1, true)];
    assert_eq!(guest.send_chain(&pieces), Some(ends(OK)));
    guest.header(HEADER, IN, 3);
    guest.memory.write_obj(NONE, GuestAddress(TO + 512)).unwrap();
    guest.send_chain(&[(HEADER, 16, false), (TO, 513, true)]).unwrap();
    let mut data = [0; 513];
    guest.memory.read_slice(&mut data, GuestAddress(TO)).unwrap();
    assert!(data[..512] == [0x5a; 512] && data[512] == OK);
    // Data behind the header in one piece.
    guest.header(FROM, OUT, 4);
    guest.memory.write_slice(&[0xa5; 512], GuestAddress(FROM + 16)).unwrap();
    assert_eq!(guest.send_chain(&[(FROM, 528, false), (STATUS, 1, true)]), Some(ends(OK)));
    assert!(guest.read_disk(4, &[512]).1 == [0xa5; 512]);
}

#[test]
fn what_is_written_is_in_the_file_at_once() {
    let file = image();
    let mut guest = disk(file.path(), true);
    let mut expected = content();
    let mut write = |sector: u64, bytes: &[u8]| {
        assert_eq!(guest.write_disk(sector, bytes), ends(OK));
        let at = usize::try_from(sector * 512).unwrap();
        expected[at..at + bytes.len()].copy_from_slice(bytes);
        // Before any flush: the kernel has it, whatever becomes of this process.
        assert!(fs::read(file.path()).unwrap() == expected, "{sector}");
    };
    write(0, &[1; 512]);
    write(SECTORS - 1, &[2; 512]);
    write(7, &(0..700 * 512).map(|at: u32| at.to_le_bytes()[0]).collect::<Vec<_>>());
    assert_eq!(guest.send(FLUSH, 0, &[]), Some(ends(OK)));
    assert_eq!(guest.read_disk(0, &[512]), (ok(513), vec![1; 512]));
}

#[test]
fn a_disk_that_is_only_read_is_never_written() {
    let file = image();
    let mut guest = disk(file.path(), false);
    assert_eq!(guest.write_disk(0, &[1; 512]), ends(ERROR));
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(guest.clear(kind, &[(0, 8, 0)]), ends(UNSUPPORTED));
    }
    assert_eq!(guest.send(FLUSH, 0, &[]), Some(ends(OK)));
    assert!(fs::read(file.path()).unwrap() == content());
}

#[test]
fn requests_that_cannot_be_done_are_answered_and_the_device_lives_on() {
    let file = image();
    let mut guest = disk(file.path(), true);
    let error = |written| Some(End { status: ERROR, length: written });
    let bad: &[(u32, u64, &[Piece], Option<End>)] = &[
        // Beyond the end, by a sector, by all, by more than there are numbers.
        (IN, SECTORS, &[(TO, 512, true)], error(0)),
        (IN, SECTORS - 1, &[(TO, 1024, true)], error(0)),
        (IN, u64::MAX, &[(TO, 512, true)], error(0)),
        (IN, u64::MAX / 512, &[(TO, 512, true)], error(0)),
        (OUT, SECTORS, &[(FROM, 512, false)], error(1)),
        (OUT, SECTORS - 1, &[(FROM, 1024, false)], error(1)),
        (OUT, u64::MAX, &[(FROM, 512, false)], error(1)),
        // Parts of sectors.
        (IN, 0, &[(TO, 511, true)], error(0)),
        (OUT, 0, &[(FROM, 100, false)], error(1)),
        // Memory that is not there, wholly or in part.
        (IN, 0, &[(MEMORY, 512, true)], error(0)),
        (IN, 0, &[(TO, 512, true), (u64::MAX - 100, 512, true)], error(512)),
        (OUT, 0, &[(MEMORY - 256, 512, false)], error(1)),
        // Ranges: none, half of one, too many.
        (DISCARD, 0, &[], error(1)),
        (DISCARD, 0, &[(FROM, 8, false)], error(1)),
        (WRITE_ZEROES, 0, &[(FROM, 17 * 16, false)], error(1)),
    ];
    guest.memory.write_slice(&[0; 1024], GuestAddress(FROM)).unwrap();
    for (kind, sector, data, expected) in bad {
        assert_eq!(&guest.send(*kind, *sector, data), expected, "{kind} {sector} {data:x?}");
    }
    for kind in [2, 3, 5, 7, 9, 14, 15, 24, 1 << 31, u32::MAX] {
        assert_eq!(guest.send(kind, 0, &[]), Some(ends(UNSUPPORTED)), "{kind}");
    }
    // A header that is not there, or not whole.
    for header in [(HEADER, 15, false), (MEMORY, 16, false)] {
        assert_eq!(guest.send_chain(&[header, (STATUS, 1, true)]), error(1), "{header:x?}");
    }
    assert_eq!(guest.send_chain(&[(STATUS, 1, true)]), error(1));
    let ranges: &[(u32, &[_], u8)] = &[
        (DISCARD, &[(SECTORS, 1, 0)], ERROR),
        (DISCARD, &[(0, u32::MAX, 0)], ERROR),
        (DISCARD, &[(u64::MAX, 1, 0)], ERROR),
        (DISCARD, &[(0, 1, 1)], UNSUPPORTED),
        (WRITE_ZEROES, &[(0, 1, 2)], UNSUPPORTED),
        // Nothing is done of what is wrong in part.
        (WRITE_ZEROES, &[(0, 8, 0), (SECTORS, 8, 0)], ERROR),
        (DISCARD, &[(0, 0, 0)], OK),
    ];
    for (kind, ranges, status) in ranges {
        assert_eq!(guest.clear(*kind, ranges), ends(*status), "{kind} {ranges:?}");
    }
    assert!(fs::read(file.path()).unwrap() == content());
    assert!(!guest.needs_reset());
    assert_eq!(guest.read_disk(1, &[512]), (ok(513), content()[512..1024].to_vec()));
}

// There is nowhere to say what is wrong.
#[test]
fn a_request_without_a_place_for_its_status_needs_a_reset() {
    let file = image();
    let mut guest = disk(file.path(), true);
    let long: Vec<_> = (0..256).map(|_| (HEADER, 16, false)).collect();
    let chains: [&[_]; 4] = [
        &[(HEADER, 16, false)],
        &[(HEADER, 16, false), (STATUS, 0, true)],
        &[(HEADER, 16, false), (MEMORY, 1, true)],
        &long,
    ];
    for chain in chains {
        guest.header(HEADER, FLUSH, 0);
        assert_eq!(guest.send_chain(chain), None, "{:x?}", chain[0]);
        assert!(guest.needs_reset());
        guest.start(u32::MAX);
        assert_eq!(guest.write_disk(0, &[3; 512]), ends(OK));
    }
}

#[test]
fn a_serial_number_is_given_as_far_as_it_fits() {
    let file = image();
    let mut guest = disk(file.path(), false);
    for length in [20, 4, 100] {
        guest.memory.write_slice(&[0xdd; 100], GuestAddress(TO)).unwrap();
        let end = guest.send(GET_ID, 0, &[(TO, length, true)]).unwrap();
        let mut id = [0; 20];
        guest.memory.read_slice(&mut id, GuestAddress(TO)).unwrap();
        let given = usize::try_from(length).unwrap().min(20);
        assert_eq!(id[..given], b"vmtrace-7\0\0\0\0\0\0\0\0\0\0\0"[..given]);
        assert_eq!(end.status, OK);
        assert_eq!(end.length, if length > 20 { 20 } else { length + 1 });
    }
    assert_eq!(guest.send(GET_ID, 0, &[]), Some(ends(OK)));
}

#[test]
fn what_is_discarded_gives_its_room_back() {
    let file = image();
    file.as_file().sync_all().unwrap();
    let before = file.as_file().metadata().unwrap().blocks();
    let mut guest = disk(file.path(), true);
    assert_eq!(guest.clear(DISCARD, &[(0, 1024, 0), (2048, 1024, 0)]), ends(OK));
    let after = file.as_file().metadata().unwrap();
    assert!(after.blocks() <= before - 1500, "{} of {before}", after.blocks());
    assert_eq!(after.len(), SECTORS * 512);
    let (file, all) = (fs::read(file.path()).unwrap(), content());
    let kept = [1024 * 512..2048 * 512, 3072 * 512..4096 * 512];
    assert!(kept.into_iter().all(|range| file[range.clone()] == all[range]));
}

// File systems without such a means, as tmpfs is where the room is to be kept, get zeroes written.
#[test]
fn what_is_cleared_is_zero_with_and_without_its_room() {
    for directory in ["/dev/shm", "."] {
        let path = Path::new(directory);
        let file = tempfile::NamedTempFile::new_in(path).unwrap();
        fs::write(file.path(), content()).unwrap();
        let mut guest = disk(file.path(), true);
        let ranges = [(1, 3, 0), (100, 1000, 0), (2000, 1, 1), (3000, 512, 1)];
        assert_eq!(guest.clear(WRITE_ZEROES, &ranges), ends(OK));
        let mut expected = content();
        for (sector, sectors, _) in ranges {
            let at = usize::try_from(sector * 512).unwrap();
            expected[at..at + 512 * sectors as usize].fill(0);
        }
        assert!(fs::read(file.path()).unwrap() == expected, "{directory}");
    }
}

// What was not negotiated does not exist, and writes without flushes are on the disk themselves.
#[test]
fn a_driver_that_wants_nothing_gets_what_is_always_there() {
    let file = image();
    let mut guest = disk(file.path(), true);
    guest.start(0);
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(guest.clear(kind, &[(0, 8, 0)]), ends(UNSUPPORTED));
    }
    assert_eq!(guest.write_disk(9, &[9; 1024]), ends(OK));
    assert_eq!(guest.read_disk(9, &[1024]), (ok(1025), vec![9; 1024]));
}

// A file that has become shorter has no data to give, which is no reason to die.
#[test]
fn errors_of_the_file_are_errors_of_requests() {
    let file = image();
    let mut guest = disk(file.path(), true);
    file.as_file().set_len(1024).unwrap();
    let (end, _) = guest.read_disk(0, &[512]);
    assert_eq!(end, ok(513));
    let (end, _) = guest.read_disk(1, &[1024]);
    assert_eq!(end, End { status: ERROR, length: 0 });
    assert!(!guest.needs_reset());
}

#[test]
fn a_queue_full_of_requests_is_done_in_order() {
    let file = image();
    let mut guest = disk(file.path(), true);
    for _ in 0..5 {
        let heads: Vec<u16> = (0..SIZE / 3).map(|number| number * 3).collect();
        for &head in &heads {
            let (header, data) = (HEADER + u64::from(head) * 16, FROM + u64::from(head) * 512);
            guest.header(header, OUT, (head % 32).into());
            guest.memory.write_slice(&[head.to_le_bytes()[0]; 512], GuestAddress(data)).unwrap();
            let status = STATUS + u64::from(head);
            guest.chain(head, &[(header, 16, false), (data, 512, false), (status, 1, true)]);
            guest.offer(head);
        }
        guest.notify();
        for head in heads {
            assert_eq!(guest.next_used(), Some((head.into(), 1)));
        }
        assert_eq!(guest.next_used(), None);
    }
    // The last of those that wrote the same place.
    for sector in 0..32_u16 {
        let last = (0..SIZE / 3).map(|number| number * 3).filter(|head| head % 32 == sector).max();
        let (_, data) = guest.read_disk(sector.into(), &[512]);
        assert_eq!(data[0], last.unwrap().to_le_bytes()[0]);
    }
}

fn within(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// Code of the guest is changed while the machine is paused: nothing may be written meanwhile.
#[test]
fn guest_memory_is_left_alone_while_the_gate_is_closed() {
    let file = image();
    let mut guest = Driver::threaded(Disk::open(file.path(), true).unwrap());
    let gate = Arc::clone(&guest.gate);
    for round in 0..20_u8 {
        gate.close();
        guest.memory.write_slice(&[0xdd; 512], GuestAddress(TO)).unwrap();
        assert_eq!(guest.send(IN, 1, &[(TO, 512, true)]), None);
        std::thread::sleep(Duration::from_millis(2));
        let mut data = [0; 512];
        guest.memory.read_slice(&mut data, GuestAddress(TO)).unwrap();
        assert!(data == [0xdd; 512] && guest.end().is_none(), "{round}");
        if round % 4 == 3 {
            // The driver changes its mind.
            guest.start(u32::MAX);
            gate.open();
            continue;
        }
        gate.open();
        let mut end = None;
        within("it goes on", || {
            end = guest.end();
            end.is_some()
        });
        assert_eq!(end, Some(ok(513)));
        guest.memory.read_slice(&mut data, GuestAddress(TO)).unwrap();
        assert!(data[..] == content()[512..1024]);
    }
    assert_eq!(guest.interrupts(), 15);
}

#[test]
fn a_reset_ends_what_is_under_way_and_the_end_waits_for_nothing() {
    let file = image();
    for _ in 0..50 {
        let mut guest = Driver::threaded(Disk::open(file.path(), true).unwrap());
        for _ in 0..4 {
            guest.send(IN, 0, &[(TO, 1 << 20, true)]);
            guest.start(u32::MAX);
            let before: Vec<u8> = vec![0x77; 4096];
            guest.memory.write_slice(&before, GuestAddress(TO)).unwrap();
            // Whoever gets this memory now keeps it.
            let mut after = vec![0; 4096];
            std::thread::yield_now();
            guest.memory.read_slice(&mut after, GuestAddress(TO)).unwrap();
            assert!(after == before);
        }
    }
}

// Two machines that write one disk leave none that is right.
#[test]
fn a_disk_is_written_by_one_alone() {
    let file = image();
    let reader = Disk::open(file.path(), false).unwrap();
    let _second = Disk::open(file.path(), false).unwrap();
    let error = Disk::open(file.path(), true).unwrap_err().to_string();
    assert!(error.contains("is used by another program, and two must not"), "{error}");
    drop((reader, _second));
    let writer = Disk::open(file.path(), true).unwrap();
    let error = Disk::open(file.path(), false).unwrap_err().to_string();
    assert!(error.contains("is used by another program, which writes it"), "{error}");
    drop(writer);
    assert!(Disk::open(file.path(), true).is_ok());
}
