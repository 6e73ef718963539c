//! Pages as readers see them.

use super::*;

/// What is in the pages of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Event(u64, u32),
    Lost(u64),
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// Reads a page of events of one word of data and 39 of nothing.
fn read(page: &[u8], seen: &mut Vec<Seen>) {
    let (mut time, used) = (long(page, 0), long(page, 8));
    let end = HEAD + usize::try_from(used & 0xfff).expect("small");
    if used & MISSED != 0 {
        seen.push(Seen::Lost(long(page, end)));
    }
    let mut at = HEAD;
    while at < end {
        let head = word(page, at);
        if head & 31 == TIME_EXTEND {
            time += u64::from(head >> 5) | u64::from(word(page, at + 4)) << DELTA_BITS;
            at += 8;
            continue;
        }
        time += u64::from(head >> 5);
        assert_eq!((head & 31, word(page, at + 4)), (0, 164));
        seen.push(Seen::Event(time, word(page, at + 8)));
        at += 168;
    }
    assert_eq!(at, end);
}

/// Adds events to pages for so many vCPUs, in order: vCPUs, and how many events of each. Every hundredth follows a
/// loss.
fn check(vcpus: u32, parts: &[(&[u32], u32)]) {
    let mut pages = Pages::new(tempfile::tempfile().expect("a file"));
    pages.begin(vcpus);
    let mut expected = vec![Vec::new(); usize::try_from(vcpus).expect("few")];
    let mut now = 0;
    for (of, count) in parts {
        for number in 0..*count {
            for vcpu in *of {
                // Some need more than the bits of an event.
                now += if number % 50 == 0 { 1 << 30 } else { 100 };
                let list = &mut expected[usize::try_from(*vcpu).expect("few")];
                if number % 100 == 99 {
                    pages.lost(*vcpu, u64::from(number)).expect("room");
                    pages.lost(*vcpu, 1).expect("room");
                    list.push(Seen::Lost(u64::from(number) + 1));
                }
                let mut data = [0; 160];
                data[..4].copy_from_slice(&number.to_le_bytes());
                pages.event(*vcpu, now, &data).expect("room");
                list.push(Seen::Event(now, number));
            }
        }
    }
    pages.finish().expect("room");
    let mut out = Vec::new();
    pages.copy(&mut out).expect("what was written");
    let mut rest = &out[..];
    for (expected, size) in expected.iter().zip(pages.sizes()) {
        let (own, others) = rest.split_at(usize::try_from(size).expect("small"));
        let mut seen = Vec::new();
        own.chunks(PAGE).for_each(|page| read(page, &mut seen));
        assert_eq!(seen, *expected);
        rest = others;
    }
    assert!(rest.is_empty());
}

// A page that is read back from another place has another vCPU's events. With runs of 8 pages and of 1, more pages in a
// row than are read at a time (there are 23 events in one), and vCPUs without any.
#[test]
fn pages_come_back_to_their_vcpu_in_order() {
    let parts: &[(&[u32], u32)] =
        &[(&[0, 1, 2], 30), (&[2, 0], 23 * 12), (&[1], 23 * 150), (&[2, 1, 0], 23 * 9 + 5)];
    for vcpus in [3, 4, 300, 4096] {
        check(vcpus, parts);
    }
    check(3, &[(&[1], 1)]);
    check(1, &[(&[0], 23 * 64), (&[0], 23 * 65)]);
    check(2, &[]);
}

// Each of thousands of vCPUs would hold as many pages as one of a few.
#[test]
fn many_vcpus_hold_few_pages_each() {
    for (vcpus, run) in [(0, 8), (1, 8), (128, 8), (129, 7), (1000, 1), (4096, 1)] {
        let mut pages = Pages::new(tempfile::tempfile().expect("a file"));
        pages.begin(vcpus);
        assert_eq!(pages.run, run);
    }
}
