//! Random changes of what is traced while the guest works. The guest must not notice any of them,
//! and must have its code back at the end.

mod triggers;

use crate::SharedHost;
use crate::asking::{Asking, PATIENCE};
use crate::cases::trouble;
use crate::console::Console;
use crate::exact::{Consumer, EXACT, Exact, FUNCTION, Kept, KeptTrigger, compare};
use crate::random::Random;
use crate::trace::{WORKLOAD, arch_of, cmdline, host_lost, kernel, lost, lost_sign};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use vmtrace::emulated::{Job, JobEnd, Stdin};
use vmtrace::kernel::{Arch, Exits, Kernel, SiteSection};
use vmtrace::serve::{Actions, Control, Globs, Source, TracerSpec, command};

/// How many rounds, unless `VMTRACE_STRESS_ROUNDS` says it.
const ROUNDS: u64 = 12;
/// What they are, unless `VMTRACE_STRESS_SEED` says it: a suite must not fail by chance.
const SEED: u64 = 20_261_122;
const CPUS: usize = 2;
/// Tracers beside that of the filter, whose sites it takes and gives back.
const TRACERS: [&str; 2] = ["vfs_r*:graph", "do_sys_*"];
/// Those that come and go.
const EXTRAS: [&str; 2] = ["extra", "second"];
/// Tracers whose totals are known, at a time, and those that come and go beside them on the same function.
const KEPT: usize = 3;
const NOISE: usize = 2;
/// Changes while calls are made that are counted.
const CHANGES: usize = 5;
/// Functions whose returns `TRACERS` want as well.
const SHARED: [&str; 3] = ["vfs_r*", "vfs_read", "vfs_re*"];
/// How vmtrace begins to say that the guest holds as many programs as it can.
pub(crate) const FULL: &str = "no place for another program";
/// In the host.
const SOCKET: &str = "/stress.socket";
/// Who changes what is traced, and asks the guest.
struct Driver<'a> {
    kernel: &'a Kernel,
    socket: &'a Path,
    guest: Asking,
    /// What the filter is.
    globs: Globs,
    /// The sites of the tracers beside the filter's.
    others: Vec<Vec<usize>>,
    /// Those of `EXTRAS`.
    extras: [Option<Vec<usize>>; 2],
    /// Whose totals are known.
    kept: Vec<Kept>,
    /// What changes beside them.
    noise: [Option<&'static Exact>; NOISE],
    /// Triggers whose counts are known.
    triggers: Vec<KeptTrigger>,
    /// Numbers of those that come and go beside them, on that function as well.
    noise_triggers: [Option<u64>; triggers::NOISE],
    /// That of one that has just been added.
    adding: Option<u64>,
    /// What was said of the last change.
    said: String,
    /// Names that were given to them, and marks.
    names: usize,
    /// Exits that were not as they were kept at the last look.
    changed_exits: usize,
    /// What the changes came to.
    tally: Tally,
}

/// Changes by what they were.
#[derive(Debug, Default)]
struct Tally {
    filters: usize,
    removed: usize,
    graph: usize,
    args: usize,
    conditional: usize,
    retval: usize,
    count: usize,
    /// Of tracers on one function whose calls are known.
    exact: usize,
    /// Of triggers there.
    triggers: usize,
    /// Those that came where they had to.
    fired: usize,
    /// Totals that were compared with these calls, and those that could not be.
    compared: usize,
    unsure: usize,
    calls: u64,
    /// Several tracers that want the returns of one function, after a change.
    shared: usize,
    /// Refused since the guest holds as many programs as it can.
    full: usize,
}

impl Driver<'_> {
    /// Gives a command that changes what is traced; returns how many sites then are.
    fn control(&mut self, control: &Control) -> Result<usize> {
        let answer = self.command(control)?;
        self.said.clone_from(&answer);
        // What else there is to say of it follows.
        let changed = answer.split("; ").next().unwrap_or_default();
        let sites = changed.strip_suffix(" sites").and_then(|text| text.rsplit_once(": "));
        sites.and_then(|(_, count)| count.parse().ok()).with_context(|| answer.clone())
    }

    fn command(&self, control: &Control) -> Result<String> {
        Ok(command(&connect(self.socket)?, control)?)
    }

    /// Sites and exits that are held, as vmtrace says.
    fn held(&self) -> Result<[u64; 2]> {
        let status: serde_json::Value = serde_json::from_str(&self.command(&Control::Status)?)?;
        let count = |key: &str| status["sites"][key].as_u64().context("no such count");
        Ok([count("patched")?, count("exits")?])
    }

    /// Makes a change, of which `done` takes note. One for which there is no place must leave all
    /// as it is.
    fn change(&mut self, control: &Control, done: impl FnOnce(&mut Self)) -> Result<()> {
        let before = self.held()?;
        let waited = self.unfired()?;
        let held = match self.control(control) {
            Err(error) if error.to_string().contains(FULL) => {
                let after = self.held()?;
                ensure!(before == after, "refused, and yet {before:?} became {after:?}");
                self.tally.full += 1;
                return Ok(());
            }
            held => held.with_context(|| format!("{control:?}"))?,
        };
        let known: Vec<u64> = self.trigger_ids().collect();
        done(self);
        // One that comes in between has no site, or has it still: only then it is not known which.
        let after = self.unfired()?;
        let [most, least] = [&waited, &after].map(|unfired| {
            let mut ids = self.trigger_ids();
            let waits = ids.any(|id| unfired.contains(&id) || !known.contains(&id));
            self.expected_with(waits).len()
        });
        ensure!(held == most || held == least, "{held} sites of {most} or {least}: {control:?}");
        Ok(())
    }

    /// Sites that hold a call while none are made of the function that triggers count.
    fn expected(&self) -> Result<BTreeSet<usize>> {
        Ok(self.expected_with(!self.unfired()?.is_empty()))
    }

    /// Sites that hold a call now: all of the filter and of the other tracers that the guest
    /// has not freed, and that of triggers if one `waits`.
    fn expected_with(&self, waits: bool) -> BTreeSet<usize> {
        let Globs { filter, notrace } = &self.globs;
        let first = self.kernel.select_with_report(filter, notrace).sites;
        let all = std::iter::once(&first).chain(&self.others).chain(self.extras.iter().flatten());
        let known = self.kept.iter().map(|kept| kept.exact).chain(self.noise.into_iter().flatten());
        let known =
            known.filter(|exact| exact.at_entry).filter_map(|_| self.kernel.site_of(FUNCTION));
        let triggers = waits.then(|| self.kernel.site_of(FUNCTION)).flatten();
        let all = all.flatten().copied().chain(known).chain(triggers);
        let sites = self.kernel.sites();
        all.filter(|&site| sites[site].section == SiteSection::Text).collect()
    }

    /// Adds a tracer, mostly with returns, or removes one that was added.
    fn change_tracers(&mut self, random: &mut Random, named: &[&str]) -> Result<()> {
        let which = random.below(EXTRAS.len());
        let name = EXTRAS[which].to_owned();
        if self.extras[which].is_some() {
            return self.change(&Control::TracerRemove(name), |driver| {
                driver.extras[which] = None;
                driver.tally.removed += 1;
            });
        }
        let Globs { mut filter, notrace } = random_globs(random, named);
        if random.below(2) == 0 {
            filter.push(SHARED[random.below(SHARED.len())].to_owned());
        }
        let graph = random.below(3) > 0;
        let (args, retval) = (random.below(3) == 0, random.below(3) == 0);
        let counts = !graph && !args && !retval;
        let callers = counts && random.below(2) == 0;
        let actions = Actions { graph, args, retval, count: counts && !callers, callers };
        // What tells nothing of a call lies in the same code as what does.
        let conditions = ["pid == 1", "comm != \"vmtrace*\" || !(caller == ksys_read) && tgid & 1"];
        let condition = conditions.get(random.below(4)).map(|text| text.parse()).transpose()?;
        self.add(
            which,
            TracerSpec { name: Some(name), filter, notrace, actions, histogram: None, condition },
        )
    }

    fn add(&mut self, which: usize, spec: TracerSpec) -> Result<()> {
        let sites = self.kernel.select_with_report(&spec.filter, &spec.notrace).sites;
        let Actions { graph, args, retval, .. } = spec.actions;
        let counts = spec.actions.counts();
        let conditional = spec.condition.is_some();
        self.change(&Control::TracerAdd(spec), |driver| {
            let shared = sites.iter().any(|site| driver.others[0].contains(site));
            let tally = &mut driver.tally;
            tally.graph += usize::from(graph);
            tally.args += usize::from(args);
            tally.conditional += usize::from(conditional);
            tally.retval += usize::from(retval);
            tally.count += usize::from(counts);
            tally.shared += usize::from(shared && (graph || retval));
            driver.extras[which] = Some(sites);
        })
    }

    /// Exits (by their addresses) within a run of bytes that differ from what was kept.
    fn exits_in(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        let exits = self.kernel.exits().map(Exits::all).unwrap_or_default();
        let addresses = exits.iter().map(|exit| exit.address);
        addresses.filter(move |&address| address < end && address + 5 > start)
    }

    /// Sites (indices) whose bytes are not as they were kept, by the guest's own look.
    fn changed(&mut self) -> Result<BTreeSet<usize>> {
        let said = self.guest.ask("compare")?;
        let base = self.kernel.symbols().address("_text").context("no _text")?;
        let sites = self.kernel.sites();
        let after = match self.kernel.arch() {
            Arch::X86_64 => |site: &vmtrace::kernel::Site| site.location + 5,
            Arch::Riscv64 => |site: &vmtrace::kernel::Site| site.entry + 8,
        };
        let mut changed = BTreeSet::new();
        // One that has a byte in common with what was kept differs in two places.
        let mut exits = BTreeSet::new();
        for range in said.iter().filter_map(|line| line.strip_prefix("differs ")) {
            let (start, end) = range.split_once(' ').context("no range")?;
            let start = base + u64::from_str_radix(start, 16)?;
            let end = base + u64::from_str_radix(end, 16)?;
            exits.extend(self.exits_in(start, end));
            let first = sites.partition_point(|site| after(site) <= start);
            // What lies in no site is the kernel's own: it switches static branches.
            changed.extend((first..sites.len()).take_while(|&site| sites[site].location < end));
        }
        self.changed_exits = exits.len();
        Ok(changed)
    }

    fn drive(&mut self, seed: u64, rounds: u64) -> Result<()> {
        self.guest.ready()?;
        ensure!(self.control(&Control::Pause)? == 0, "a pause gives all back");
        self.guest.ask("keep")?;
        self.control(&Control::Resume)?;
        // A comparison that sees nothing would prove nothing.
        let globs = Globs { filter: vec!["vfs_*".into()], notrace: Vec::new() };
        self.change(&Control::Filter(globs.clone()), |driver| driver.globs = globs)?;
        let (changed, expected) = (self.changed()?, self.expected()?);
        ensure!(changed == expected && changed.len() > 50, "{changed:?} are not {expected:?}");
        let [_, exits] = self.held()?;
        ensure!(exits > 4, "only {exits} exits are held");
        if self.kernel.arch() == Arch::X86_64 {
            ensure!(self.changed_exits as u64 == exits, "{} of {exits}", self.changed_exits);
        }
        // Whatever the numbers are, these are part of it.
        for (which, text) in
            ["a=vfs_read,vfs_w*:args+retval", "b=vfs_read:graph"].iter().enumerate()
        {
            let spec = TracerSpec { name: Some(EXTRAS[which].to_owned()), ..text.parse()? };
            self.add(which, spec)?;
        }

        let stream = Source::Unix(self.socket.into()).connect(PATIENCE)?;
        let consumer = Consumer::new(stream)?;
        let mut random = Random::new(seed);
        let kernel = self.kernel;
        let kept = kernel.sites().iter().filter(|site| site.section == SiteSection::Text);
        let named: Vec<&str> = kept.filter_map(|site| kernel.site_name(site)).collect();
        // The guest's own tracers come and go at the same time, or totals are compared.
        for round in 0..rounds {
            if round % 2 == 1 {
                let exact = self.exact(&mut random, &named, &consumer);
                exact.with_context(|| format!("round {round}"))?;
                continue;
            }
            let request = format!("churn {}", 1 + random.below(1 << 30));
            let churn = self.guest.request(&request)?;
            let ours = self.round(&mut random, &named);
            let theirs = self.guest.answer(&churn);
            ours.with_context(|| format!("round {round}"))?;
            theirs.with_context(|| format!("round {round}"))?;
        }

        let Tally { compared, unsure, .. } = self.tally;
        ensure!(rounds < 2 || compared > unsure, "of too many totals it is not known: {unsure}");
        self.remove_triggers()?;
        ensure!(self.control(&Control::Pause)? == 0, "a pause gives all back");
        let changed = self.changed()?;
        let names = changed.iter().filter_map(|&site| {
            let site = self.kernel.sites().get(site)?;
            self.kernel.site_name(site)
        });
        ensure!(self.changed_exits == 0, "{} exits are not as before", self.changed_exits);
        ensure!(changed.is_empty(), "not as before: {:?}", names.collect::<Vec<_>>());
        Ok(())
    }

    /// Calls that are counted by the guest and by tracers, while other tracers of that function come and go.
    fn exact(&mut self, random: &mut Random, named: &[&str], consumer: &Consumer) -> Result<()> {
        if self.kept.len() == KEPT {
            let gone = self.kept[random.below(KEPT)].name.clone();
            self.change(&Control::TracerRemove(gone.clone()), |driver| {
                driver.kept.retain(|kept| kept.name != gone);
                driver.tally.exact += 1;
            })?;
        }
        for _ in self.kept.len()..KEPT {
            self.names += 1;
            let kept = Kept::new(random, format!("exact{}", self.names));
            let spec = kept.exact.spec(&kept.name)?;
            self.change(&Control::TracerAdd(spec), |driver| {
                driver.kept.push(kept);
                driver.tally.exact += 1;
            })?;
        }
        self.change_triggers(random)?;
        self.guest.ask("begin")?;
        for _ in 0..CHANGES {
            self.disturb(random, named)?;
        }
        let calls = self.guest.ask("finish")?;
        let calls = calls.iter().filter_map(|line| line.strip_prefix("called ")?.parse().ok());
        let calls: Vec<u64> = calls.collect();
        ensure!(calls.len() == CPUS && !calls.contains(&0), "too few calls: {calls:?}");
        self.names += 1;
        let mark = format!("behind all calls {}", self.names);
        self.command(&Control::Mark { ticks: None, text: mark.clone() })?;
        let table = self.command(&Control::Table)?;
        let list = self.command(&Control::TriggerList)?;
        let fired = |driver: &Self| driver.triggers.iter().filter(|kept| kept.fired).count();
        let before = fired(self);
        let kept = (&mut self.kept[..], &mut self.triggers[..]);
        let compared = compare(kept, &calls, (&table, &list), (consumer, &mark))?;
        self.tally.fired += fired(self) - before;
        self.tally.calls += calls.iter().sum::<u64>();
        self.tally.compared += compared;
        self.tally.unsure += self.kept.len() - compared;
        Ok(())
    }

    /// Some change beside tracers whose totals are known.
    fn disturb(&mut self, random: &mut Random, named: &[&str]) -> Result<()> {
        if random.below(3) == 0 {
            return self.disturb_triggers(random);
        }
        let which = random.below(NOISE + 1);
        let Some(noise) = self.noise.get(which) else {
            let mut globs = random_globs(random, named);
            if random.below(2) == 0 {
                globs.filter.push(FUNCTION.to_owned());
            }
            return self.change(&Control::Filter(globs.clone()), |driver| {
                driver.globs = globs;
                driver.tally.filters += 1;
            });
        };
        let (name, exact) = (format!("noise{which}"), &EXACT[random.below(EXACT.len())]);
        let (control, after) = match noise {
            Some(_) => (Control::TracerRemove(name), None),
            None => (Control::TracerAdd(exact.spec(&name)?), Some(exact)),
        };
        self.change(&control, |driver| {
            driver.noise[which] = after;
            driver.tally.exact += 1;
        })
    }

    fn round(&mut self, random: &mut Random, named: &[&str]) -> Result<()> {
        let globs = random_globs(random, named);
        self.change(&Control::Filter(globs.clone()), |driver| {
            driver.globs = globs;
            driver.tally.filters += 1;
        })?;
        if random.below(2) == 0 {
            self.change_tracers(random, named)?;
        }
        if random.below(10) == 0 {
            let before = self.held()?;
            // Triggers go on.
            let waits = usize::from(!self.unfired()?.is_empty());
            let held = self.control(&Control::Pause)?;
            let in_pause = self.held()?;
            ensure!(held == waits && in_pause == [waits as u64, 0], "{held} sites in a pause");
            let held = self.control(&Control::Resume)?;
            let (expected, after) = (self.expected()?.len(), self.held()?);
            ensure!(held == expected && before == after, "{before:?} became {after:?}");
        }
        Ok(())
    }
}

/// Some functions, and in half of all cases those with a common beginning.
pub(crate) fn random_globs(random: &mut Random, named: &[&str]) -> Globs {
    let mut one = || named[random.below(named.len())].to_owned();
    let mut filter: Vec<String> = (0..8).map(|_| one()).collect();
    filter.truncate(1 + random.below(8));
    if random.below(2) == 0 {
        let name = named[random.below(named.len())];
        let len = 3 + random.below(4);
        filter.push(format!("{}*", name.get(..len).unwrap_or(name)));
    }
    Globs { filter, notrace: Vec::new() }
}

/// A connection to the socket of a run, whose answers may take a while.
pub(crate) fn connect(socket: &Path) -> Result<UnixStream> {
    let stream = Source::Unix(socket.into()).connect(PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn number(variable: &str) -> Result<Option<u64>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    Ok(Some(text.parse().with_context(|| format!("{variable}={text}"))?))
}

/// A guest forks and files on two vCPUs while what is traced changes at random.
///
/// `VMTRACE_STRESS_ROUNDS` says how often, `VMTRACE_STRESS_SEED` repeats a plan (not its
/// moments).
pub fn stress(host: &SharedHost, name: &str) -> Result<()> {
    let rounds = number("VMTRACE_STRESS_ROUNDS")?.unwrap_or(ROUNDS);
    let seed = number("VMTRACE_STRESS_SEED")?.unwrap_or(SEED).max(1);
    let kernel = kernel(name)?;
    loop {
        let start = Instant::now();
        let (driven, tally, end, said) = match once(host, name, &kernel, seed, rounds) {
            Err(error) if host_lost(&error) => {
                lost(&format!("{name}, stress, seed {seed}: {error}"))?;
                continue;
            }
            result => result?,
        };
        let is_lost = lost_sign(&said).is_some()
            || (driven.is_err() && said.contains("vmtrace: guest timeout"));
        if is_lost {
            lost(&format!("{name}, stress, seed {seed}: {driven:?}\n{said}"))?;
            continue;
        }
        driven.with_context(|| format!("{name}, seed {seed}\n{said}"))?;
        ensure!(end.code == Some(0), "{name}, seed {seed}: {end:?}\n{said}");
        ensure!(trouble(&said).is_none(), "{name}, seed {seed}: {:?}\n{said}", trouble(&said));
        // The control socket makes vmtrace tell that these guests have no vsock.
        let mut notes = said.lines().filter(|line| line.starts_with("vmtrace: note"));
        let note = notes.find(|note| !note.contains("no vsock in the guest"));
        ensure!(note.is_none(), "{name}, seed {seed}: {note:?}\n{said}");
        let work = said.lines().filter_map(|line| line.trim().strip_prefix("worked "));
        let work: Vec<u64> = work.map(str::parse).collect::<Result<_, _>>()?;
        ensure!(work.len() == CPUS && work.iter().all(|&work| work > 0), "{work:?}\n{said}");
        println!("{name}: seed {seed}, {rounds} rounds in {:?}, {work:?} of work", start.elapsed());
        println!("  {tally:?}");
        for line in said.lines().filter(|line| line.starts_with("vmtrace: ")) {
            println!("  {}", line.trim());
        }
        return Ok(());
    }
}

fn once(
    host: &SharedHost,
    name: &str,
    kernel: &Kernel,
    seed: u64,
    rounds: u64,
) -> Result<(Result<()>, Tally, JobEnd, String)> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let console = Console::default();
    let (reader, input) = std::io::pipe()?;
    let others = TRACERS.iter().map(|text| -> Result<_> {
        let TracerSpec { filter, notrace, .. } = text.parse()?;
        Ok(kernel.select(&filter, &notrace)?)
    });
    let others = others.collect::<Result<_>>()?;
    let mut driver = Driver {
        kernel,
        socket: &socket,
        guest: Asking::new(console.clone(), input),
        globs: Globs::default(),
        others,
        extras: [None, None],
        kept: Vec::new(),
        noise: [None; NOISE],
        triggers: Vec::new(),
        noise_triggers: [None; triggers::NOISE],
        adding: None,
        said: String::new(),
        names: 0,
        changed_exits: 0,
        tally: Tally::default(),
    };
    let (image, work) = (format!("/k/{name}"), format!("{WORKLOAD} stress {CPUS}"));
    let (cpus, timeout) = (CPUS.to_string(), 600 + 10 * rounds);
    let seconds = timeout.to_string();
    let mut args = vec!["boot", &image, "--host", "kvm", "-o", "/dev/null", "-f", "vfs_*"];
    args.extend(["--cpus", &cpus, "--timeout", &seconds, "--socket", SOCKET]);
    let cmdline = cmdline(arch_of(name)?);
    args.extend(["--cmdline", &cmdline, "--add", WORKLOAD, "--run", &work]);
    // Some guests must know before.
    args.extend(["--returns", "*"]);
    // One kernel is where KASLR has put it.
    let boot_image = format!("--boot-image={image}.bz");
    if name == "x86_64-7" {
        args.extend(["--kaslr", &boot_image]);
    }
    args.extend(TRACERS.iter().flat_map(|globs| ["--tracer", globs]));
    let (mut stdout, mut stderr) = (std::io::sink(), console.clone());
    let mut job = Job::new(args, &mut stdout, &mut stderr);
    job.stdin = Stdin::Reader(Box::new(reader));
    job.timeout = Some(Duration::from_secs(timeout + 60));
    let (driven, end) = host.with(|host| {
        let tunnel = host.tunnel(&socket, SOCKET);
        let mut driven = Ok(());
        let end = std::thread::scope(|scope| {
            scope.spawn(|| {
                driven = tunnel
                    .map_err(anyhow::Error::from)
                    .and_then(|_tunnel| driver.drive(seed, rounds));
                // However it went; the guest may be gone.
                driver.guest.end();
            });
            let end = host.run(job);
            console.end();
            end
        })?;
        Ok((driven, end))
    })?;
    Ok((driven, driver.tally, end, console.text()))
}
