//! Random reads and writes of a disk, past the page cache; what is read must be what was written.

use anyhow::{Context, Result, ensure};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Pages of a request.
const MOST: usize = 16;
/// How long whoever counts exits from outside has for it, before and after.
const LOOK: Duration = Duration::from_millis(300);

/// What a request with O_DIRECT must be aligned to.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Bytes of pages.
fn bytes(pages: &mut [Page]) -> &mut [u8] {
    let length = pages.len() * PAGE;
    // SAFETY: a page is so many bytes, of which any value is one, and has no others.
    unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), length) }
}

/// A generator of numbers that repeat with the seed (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap_or(0)
    }
}

/// What a page has that was written so often: zeroes before the first time.
fn fill(page: &mut [u8], number: usize, written: u32) {
    let mut words = Numbers((number as u64) << 32 | u64::from(written));
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&if written == 0 { 0 } else { words.next() }.to_le_bytes());
    }
}

/// What one thread did.
#[derive(Default)]
struct Done {
    read: u64,
    written: u64,
    flushes: u64,
}

/// So many requests to pages of its own, from `first` on, of which `written` says how often each was written.
fn requests(
    disk: &File,
    first: usize,
    written: &mut [u32],
    seed: u64,
    count: usize,
) -> Result<Done> {
    let (mut numbers, mut done) = (Numbers(seed), Done::default());
    let (mut pages, mut expected) = (vec![Page([0; PAGE]); MOST], [0; PAGE]);
    for _ in 0..count {
        let start = numbers.below(written.len());
        let length = (1 + numbers.below(MOST)).min(written.len() - start);
        let there = written.get_mut(start..start + length).context("pages")?;
        let (at, data) =
            (((first + start) * PAGE) as u64, bytes(pages.get_mut(..length).context("pages")?));
        match numbers.below(32) {
            0 => {
                disk.sync_data()?;
                done.flushes += 1;
            }
            1..=16 => {
                for ((page, times), number) in
                    data.chunks_exact_mut(PAGE).zip(there).zip(first + start..)
                {
                    *times += 1;
                    fill(page, number, *times);
                }
                disk.write_all_at(data, at)?;
                done.written += (length * PAGE) as u64;
            }
            _ => {
                data.fill(0xee);
                disk.read_exact_at(data, at)?;
                for ((page, times), number) in
                    data.chunks_exact(PAGE).zip(there).zip(first + start..)
                {
                    fill(&mut expected, number, *times);
                    ensure!(
                        page == expected,
                        "page {number}, written {times} times, has another content"
                    );
                }
                done.read += (length * PAGE) as u64;
            }
        }
    }
    Ok(done)
}

/// `count` requests by each of so many threads, to a disk of zeroes; then all of it is read. Prints what was done, how
/// long it took, and a hash (FNV-1a) of the content that is there now.
pub(crate) fn disk(path: &str, seed: u64, count: usize, threads: usize) -> Result<()> {
    let direct = |options: &mut OpenOptions| options.custom_flags(libc::O_DIRECT).open(path);
    let mut disk =
        direct(OpenOptions::new().read(true).write(true)).with_context(|| path.to_owned())?;
    let pages = usize::try_from(disk.seek(SeekFrom::End(0))?)? / PAGE;
    let mut written = vec![0_u32; pages];
    let share = pages.div_ceil(threads).max(1);
    println!("disk begins");
    std::thread::sleep(LOOK);
    let begin = Instant::now();
    let done = std::thread::scope(|scope| {
        let parts = written.chunks_mut(share).enumerate();
        let parts: Vec<_> = parts
            .map(|(part, written)| {
                let disk = &disk;
                scope
                    .spawn(move || requests(disk, part * share, written, seed + part as u64, count))
            })
            .collect();
        let all =
            parts.into_iter().map(|part| part.join().map_err(|_| anyhow::anyhow!("a panic"))?);
        all.collect::<Result<Vec<Done>>>()
    })?;
    let nanoseconds = begin.elapsed().as_nanos();
    println!("disk ends");
    std::thread::sleep(LOOK);
    let sum = |of: fn(&Done) -> u64| done.iter().map(of).sum::<u64>();
    let (read, wrote, flushes) = (sum(|d| d.read), sum(|d| d.written), sum(|d| d.flushes));
    let (mut hash, mut page, mut expected) =
        (0xcbf2_9ce4_8422_2325_u64, vec![Page([0; PAGE])], [0; PAGE]);
    disk.sync_all()?;
    for (number, &times) in written.iter().enumerate() {
        let data = bytes(&mut page);
        disk.read_exact_at(data, (number * PAGE) as u64)?;
        fill(&mut expected, number, times);
        ensure!(
            data == expected,
            "page {number}, written {times} times, has another content in the end"
        );
        hash = data
            .iter()
            .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    }
    println!("disk-requests {}", count * done.len());
    println!(
        "disk-read {read}\ndisk-written {wrote}\ndisk-flushes {flushes}\ndisk-ns {nanoseconds}\ndisk-hash {hash:016x}"
    );
    Ok(())
}
