//! Memory that is in place before it is needed.

use std::hint::black_box;

/// An empty list with memory for so many, each page of which was written to. Not all bytes of the
/// `filler` are zero: the system would be asked for zeros, and nothing be written.
pub(super) fn touched<T: Clone>(count: usize, filler: T) -> Vec<T> {
    let mut list = Vec::with_capacity(count);
    list.resize(count, filler);
    // Else the compiler may see that nobody reads it.
    let mut list = black_box(list);
    list.clear();
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::resource::{UsageWho, getrusage};

    /// Of this thread.
    fn faults() -> i64 {
        getrusage(UsageWho::RUSAGE_THREAD).unwrap().minor_page_faults()
    }

    // The guest would wait for the pages.
    #[test]
    fn room_is_in_place() {
        // So much that the allocator has nothing of it left over from before.
        const COUNT: usize = 6 << 20;
        let fill = |mut list: Vec<u64>| {
            let before = faults();
            list.resize(COUNT, 7);
            black_box(&list);
            faults() - before
        };
        let (cold, warm) = (fill(Vec::with_capacity(COUNT)), fill(touched(COUNT, 7)));
        // By huge pages, if the system likes, which may also move a page meanwhile.
        assert!(warm * 4 < cold, "{cold} and {warm}");
    }
}
