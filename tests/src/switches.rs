//! Events of interrupts and preemption that are switched, compared with the state of the CPU in
//! other records.

use std::collections::BTreeMap;

use vmtrace::stream::{Frame, Reader, Record};

use crate::cases::{Guests, trouble};

/// What is known of a vCPU.
#[derive(Default)]
struct Cpu {
    interrupts: Option<bool>,
    preemption: Option<bool>,
    /// An interrupt came between a change of the count and its record.
    between: bool,
}

impl Guests {
    /// A state that is made of events must be the one that functions are entered in.
    pub fn switches_agree_with_the_state_of_the_cpu(&self, name: &str) {
        let args =
            ["--event", "preemptirq:*", "--context", "-f", "vfs_*", "-f", "tick_*", "--cpus", "2"];
        let (finished, trace) = self.run(name, "files", &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        // Kernels without CONFIG_PREEMPT_COUNT.
        let counts = !err.contains("it does not count preemptions");
        let mut reader = Reader::new(&trace.stream[..]).unwrap();
        let (mut names, mut cpus) = (BTreeMap::new(), BTreeMap::<u32, Cpu>::new());
        let (mut compared, mut between, mut wrong) = ([0_u32; 2], 0_u32, Vec::new());
        while let Some(frame) = reader.next_frame().unwrap() {
            let batch = match frame {
                Frame::Symbols(list) => {
                    for symbol in list {
                        symbol.with_text(|s| names.insert(s.address, s.name.to_owned()));
                    }
                    continue;
                }
                Frame::Records(batch) => batch,
                // Behind a gap nothing is known: rings are small for so many records.
                Frame::Loss(loss) => {
                    cpus.remove(&loss.vcpu);
                    continue;
                }
                _ => continue,
            };
            let cpu = cpus.entry(batch.vcpu).or_default();
            for record in batch.records() {
                let [off, _, nested, depth, _] = record.context().unwrap_or_default().columns();
                let address = trace.header.address(record.function().unwrap());
                let own = names.get(&address).map_or("", String::as_str);
                let is_nmi = matches!(nested, b'z' | b'Z');
                // Realtime kernels count soft interrupts elsewhere.
                let counted = depth != b'.' || matches!(nested, b'h' | b'H');
                match (own, &record) {
                    ("preemptirq:irq_disable", _) => {
                        cpu.between |= cpu.preemption == Some(true) && counted && !is_nmi;
                        cpu.interrupts = Some(false);
                    }
                    ("preemptirq:irq_enable", _) => cpu.interrupts = Some(true),
                    ("preemptirq:preempt_disable" | "preemptirq:preempt_enable", _) => {
                        (cpu.preemption, cpu.between) = (Some(own.ends_with("enable")), false);
                    }
                    (_, Record::Entry { .. }) if !is_nmi => {
                        if let Some(on) = cpu.interrupts {
                            compared[0] += 1;
                            if on == matches!(off, b'd' | b'D') {
                                wrong.push(format!("{own}: interrupts {on}"));
                            }
                        }
                        // Soft interrupts are not told from softirqs that are off: left out.
                        let plain = nested == b'.' && matches!(off, b'd' | b'.');
                        match cpu.preemption {
                            _ if cpu.between => between += 1,
                            Some(on) if plain && on == counted => {
                                compared[1] += 1;
                                wrong.push(format!("{own}: preemption {on}"));
                            }
                            Some(_) => compared[1] += 1,
                            None => {}
                        }
                    }
                    _ => {}
                }
            }
        }
        eprintln!("{name}: {compared:?} compared, {between} between, {} wrong", wrong.len());
        assert!(compared[0] > 200, "{name}: {compared:?}");
        assert_eq!(compared[1] > 200, counts, "{name}: {compared:?}");
        let interrupts = wrong.iter().filter(|it| it.contains("interrupts")).count();
        assert_eq!(interrupts, 0, "{name}: {wrong:?}");
        // In a few functions the count is changed by instructions without room (of RT: __d_add).
        if !name.ends_with("-rt") {
            let few = wrong.is_empty() || wrong.len() * 1000 < compared[1] as usize;
            assert!(few, "{name}: {wrong:?}");
        }
    }
}
