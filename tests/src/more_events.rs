//! Events of modules, disks, packets and memory compared with the guest's own trace of them.

use std::collections::BTreeMap;

use vmtrace::kernel::{Kernel, Symbols};

use crate::cases::{Guests, assert_whole, trouble, value};
use crate::events::{BEGIN, END, Mark, Seen, lines, section, told};
use crate::trace::{arch_of, cmdline, kernel};

/// The module that is loaded, which makes the disk.
const MODULE: &str = "loop";

/// Events of the first part.
const FIRST: [&str; 13] = [
    "signal:signal_generate",
    "module:module_load",
    "module:module_free",
    "block:block_rq_issue",
    "block:block_rq_insert",
    "block:block_rq_complete",
    "block:block_bio_queue",
    "net:net_dev_queue",
    "net:net_dev_xmit",
    "net:netif_rx",
    "net:netif_receive_skb",
    "skb:consume_skb",
    "skb:kfree_skb",
];
/// Events that the second part has beside them.
const SECOND: [&str; 8] = [
    "kmem:kmalloc",
    "kmem:kfree",
    "kmem:kmem_cache_alloc",
    "kmem:kmem_cache_free",
    "kmem:mm_page_alloc",
    "kmem:mm_page_free",
    "exceptions:page_fault_user",
    "exceptions:page_fault_kernel",
];
/// Of these there are some in each part, by its number.
const SURE: [(usize, &str); 19] = [
    (0, "module_load"),
    (0, "module_free"),
    (0, "block_rq_issue"),
    (0, "block_rq_complete"),
    (0, "block_bio_queue"),
    (0, "net_dev_queue"),
    (0, "net_dev_xmit"),
    (0, "netif_rx"),
    (0, "netif_receive_skb"),
    (0, "consume_skb"),
    (0, "kfree_skb"),
    (1, "kmalloc"),
    (1, "kfree"),
    (1, "kmem_cache_alloc"),
    (1, "kmem_cache_free"),
    (1, "mm_page_alloc"),
    (1, "mm_page_free"),
    (1, "page_fault_user"),
    (1, "page_fault_kernel"),
];

/// What the guest does between these (`vmtrace-guest events-more`).
const PARTS: [(Mark, Mark); 2] =
    [(BEGIN, END), (("signal_generate", "sig=12 "), ("signal_generate", "sig=21 "))];

/// What stands before a place in the kernel's code.
const PLACES: [&str; 3] = ["call_site=", "location=", "ip="];

/// A place in the kernel's code: as the kernel prints it (`NAME+0xOFFSET/0xSIZE`, or `NAME` alone), the same of a module
/// (`[MODULE]` behind it), or a number.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Named(String, u64),
    Within(String),
    OfModule,
    Number(u64),
}

/// A line without its place in the code.
fn apart(text: &str) -> (String, Option<Place>) {
    let found = PLACES.iter().find_map(|key| {
        let (front, rest) = text.split_once(key)?;
        let end = rest.find(' ').unwrap_or(rest.len());
        let (place, rest) = rest.split_at(end);
        Some((format!("{front}{key}"), place, rest))
    });
    let Some((front, place, rest)) = found else { return (text.to_owned(), None) };
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let named = place.split_once('+').and_then(|(name, rest)| {
        let (offset, _) = rest.split_once('/')?;
        Some(Place::Named(name.to_owned(), hex(offset)?))
    });
    let (named, rest) = match rest.strip_prefix(" [").and_then(|rest| rest.split_once(']')) {
        Some((_, rest)) if named.is_some() => (Some(Place::OfModule), rest),
        _ => (named, rest),
    };
    let number = || hex(place).map(Place::Number);
    let place = named.or_else(number).or_else(|| Some(Place::Within(place.to_owned())));
    (format!("{front}{rest}"), place)
}

/// Whether a number is the place that the kernel has named. Where modules are is known to the kernel alone.
fn is_there(symbols: &Symbols, slide: u64, ours: &Place, theirs: &Place) -> bool {
    match (ours, theirs) {
        (Place::Number(ours), Place::Named(name, offset)) => {
            let start = ours.wrapping_sub(slide).wrapping_sub(*offset);
            symbols.names_at(start).any(|known| known == name)
        }
        (Place::Number(ours), Place::Within(name)) => {
            let link = ours.wrapping_sub(slide);
            let start = symbols.lookup(link).map(|(_, start)| start);
            start.is_some_and(|start| symbols.names_at(start).any(|known| known == name))
        }
        (Place::Number(_), Place::OfModule) => true,
        _ => ours == theirs,
    }
}

/// The events between two marks, by their names and tasks; `names` are those that both sides trace.
fn between(all: &[Seen], (begin, end): (Mark, Mark), names: &[&str]) -> Vec<Seen> {
    let is_meant =
        |seen: &&Seen| names.iter().any(|name| name.ends_with(&format!(":{}", seen.name)));
    section(all, begin, end).iter().filter(is_meant).cloned().collect()
}

/// Texts by event, sorted: an interrupt may come between one side's look at an event and the other's, and brings
/// events of its own.
fn by_event(all: Vec<Seen>) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for seen in all {
        found.entry(seen.name).or_default().push(seen.text);
    }
    found.values_mut().for_each(|texts| texts.sort_unstable());
    found
}

/// The address of a page's description, which is no field: the number of the page is one.
fn without_page(mut seen: Seen) -> Seen {
    if let Some((_, rest)) = seen.text.strip_prefix("page=").and_then(|text| text.split_once(' ')) {
        seen.text = rest.to_owned();
    }
    seen
}

/// What differs in the texts of one event.
fn difference(kernel: &Kernel, slide: u64, ours: &[String], theirs: &[String]) -> Option<String> {
    let apart = |texts: &[String]| {
        let mut all: Vec<_> = texts.iter().map(|text| apart(text)).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    };
    let (mut ours, theirs) = (apart(ours), apart(theirs));
    let mut missing = Vec::new();
    for (text, place) in &theirs {
        let same = |(own, at): &(String, Option<Place>)| {
            own == text
                && match (at, place) {
                    (Some(at), Some(place)) => is_there(kernel.symbols(), slide, at, place),
                    (at, place) => at == place,
                }
        };
        match ours.iter().position(same) {
            Some(found) => drop(ours.remove(found)),
            None => missing.push((text, place)),
        }
    }
    let (ours, missing) = (&ours[..ours.len().min(3)], &missing[..missing.len().min(3)]);
    (!ours.is_empty() || !missing.is_empty())
        .then(|| format!("only vmtrace: {ours:#?}\n  only the guest: {missing:#?}"))
}

impl Guests {
    /// What a request, a packet or memory is said to be must be what the kernel says of it: each of these events was
    /// computed from its arguments by a table of ours alone before.
    pub fn events_of_devices_and_memory_are_those_of_the_guests_own_trace(&self, name: &str) {
        let known = kernel(name).unwrap();
        let all = known.events().unwrap();
        let has = |event: &&str| all.iter().any(|known| known.full_name() == **event);
        let parts = [&FIRST[..], &SECOND]
            .map(|part| part.iter().copied().filter(|it| has(it)).collect::<Vec<_>>());
        let module = self.put_module(name, MODULE);
        let mut args = vec!["--add", &module, "--overflow", "block", "--cpus", "1"];
        args.extend(parts.iter().flatten().flat_map(|event| ["--event", event]));
        let cmdline = format!("{} no_hash_pointers", cmdline(arch_of(name).unwrap()));
        args.extend(["--cmdline", &cmdline]);
        let paths = parts.each_ref().map(|part| part.join(",").replace(':', "/"));
        let run = format!("events-more /{MODULE}.ko {} {}", paths[0], paths[1]);
        let (finished, trace) = self.run(name, &run, &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        assert_whole(name, &trace.summary, &err);

        let (ours, theirs) = (lines(&trace), told(&err));
        let pid = value(&finished, "pid ");
        let mut differ = Vec::new();
        for (number, part) in PARTS.into_iter().enumerate() {
            let names: Vec<&str> = parts[..=number].iter().flatten().copied().collect();
            // Others take and give memory, and may do so between one side's look at a mark and the other's.
            let own = |all: &[Seen]| {
                let mut all = between(all, part, &names);
                all.retain(|seen| number == 0 || seen.pid == pid);
                by_event(all.into_iter().map(without_page).collect())
            };
            let (ours, theirs) = (own(&ours), own(&theirs));
            for (_, event) in SURE.iter().filter(|(of, _)| *of == number) {
                // Kernels of riscv64 have those of page faults since 7.x.
                if !names.iter().any(|name| name.ends_with(&format!(":{event}"))) {
                    continue;
                }
                assert!(theirs.contains_key(*event), "{name}: no {event} in part {number}");
            }
            assert_eq!(
                ours.keys().collect::<Vec<_>>(),
                theirs.keys().collect::<Vec<_>>(),
                "{name}: part {number}"
            );
            for (event, theirs) in &theirs {
                let found = difference(&known, trace.header.slide, &ours[event], theirs);
                differ.extend(found.map(|found| format!("part {number}, {event}: {found}")));
            }
            let counts: Vec<_> = theirs.iter().map(|(event, all)| (event, all.len())).collect();
            eprintln!("{name}: part {number}: {counts:?}");
        }
        assert!(differ.is_empty(), "{name}:\n{}", differ.join("\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A test that takes everything for the same finds nothing.
    #[test]
    fn places_in_code_are_compared_apart() {
        let place = |text| apart(text).1.unwrap();
        let named = Place::Named("do_exit".to_owned(), 0x1f);
        assert_eq!(place("call_site=do_exit+0x1f/0xa00 ptr=1"), named);
        let of_module = "skbaddr=1 location=do_exit+0x1f/0xa00 [loop] reason: X";
        let text = "skbaddr=1 location= reason: X".to_owned();
        assert_eq!(apart(of_module), (text, Some(Place::OfModule)));
        let number = Place::Number(0xffff_ffff_8100_001f);
        assert_eq!(place("call_site=0xffffffff8100001f ptr=1"), number);
        assert_eq!(apart("ptr=1"), ("ptr=1".to_owned(), None));
        assert_eq!(
            place("address=0x1 ip=rep_movs error_code=0x2"),
            Place::Within("rep_movs".to_owned())
        );
        assert_eq!(place("address=0x1 ip=0x7f12 error_code=0x2"), Place::Number(0x7f12));
    }
}
