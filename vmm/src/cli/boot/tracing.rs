//! Converts options to what is to be traced.

use super::{Args, OverflowArg, conditions, times};
use crate::analyze::latency::EventsOf;
use crate::condition::Condition;
use crate::kernel::arguments::ArgumentSpec;
use crate::kernel::{Coverage, Functions, Kernel, Missing};
use crate::machine;
use crate::serve::{Globs, HistogramSpec, TracerSpec};
use crate::session::{
    self, Conditional, Doing, Follow, Histogram, Limits, Patterns, Plan, Roots, Tracer, Tracing,
    Use, Wants,
};
use crate::tracer;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace_system::say;
use vmtrace_trampolines::Overflow;

/// What a tracer is to do.
struct Asked {
    graph: bool,
    counts: bool,
    by_caller: bool,
    sorts: Option<HistogramSpec>,
    wants: Wants,
    condition: Option<Condition>,
    limits: Limits,
}

impl Args {
    /// Adds what `--latency` takes: events, as if they had been asked for, and the state of the CPU
    /// where the kernel lets that be read.
    pub(super) fn trace_latency(&mut self, kernel: &Kernel) {
        let Some(kind) = self.latency else { return };
        let is_there = |of: &&EventsOf| of.needed || session::events(kernel, of.pattern).is_ok();
        let events = kind.events().iter().filter(is_there).map(|of| of.pattern.to_owned());
        self.event.extend(events);
        self.context |= kernel.check_context().is_ok();
    }

    /// Which part of the call tree the functions of -f are recorded in.
    fn limits(&self, kernel: &Kernel) -> Result<Limits> {
        let depth = self.max_depth;
        if self.graph_root.is_empty() {
            return Ok(Limits { depth, ..Limits::default() });
        }
        let selection = kernel.select_with_report(&self.graph_root, &self.notrace);
        let of_image = |glob: &&String| Functions::of(glob).module().is_none();
        if let Some(glob) = selection.unmatched.iter().find(of_image) {
            let near = kernel.near_functions(glob);
            bail!("--graph-root: no function matches {glob:?}{near}");
        }
        let (filter, notrace) = (self.graph_root.clone(), self.notrace.clone());
        let roots = Roots { globs: Globs { filter, notrace }, sites: selection.sites };
        Ok(Limits { depth, roots: Some(roots), ..Limits::default() })
    }

    /// What to trace in `kernel`, and what the user should know of it.
    ///
    /// # Errors
    /// When no function matches, or that of `--from` cannot be traced.
    pub fn tracing(&self, kernel: &Kernel) -> Result<(Tracing, Vec<String>)> {
        let (mut tracers, mut unmatched, mut unmatched_notrace) = (vec![], vec![], vec![]);
        let (mut notes, mut boot_notes) = (Vec::new(), Vec::new());
        let mut add = |name: String, text: String, [filter, own]: [&[String]; 2], asked| {
            let Asked { graph, counts, by_caller, sorts, mut wants, condition, mut limits } = asked;
            let notrace: Vec<String> = self.notrace.iter().chain(own).cloned().collect();
            let selection = kernel.select_with_report(filter, &notrace);
            unmatched.extend(selection.unmatched);
            unmatched_notrace.extend(selection.unmatched_notrace);
            // As events do.
            let roots = limits.roots.iter().flat_map(|roots| &roots.globs.filter);
            let waits = filter
                .iter()
                .chain(roots)
                .filter_map(|glob| Some((glob, Functions::of(glob).module()?)));
            notes.extend(waits.map(|(glob, module)| match no_modules(kernel) {
                Some(why) => format!("{glob} is not traced: {why}"),
                None => format!("{glob} waits for module {module}"),
            }));
            let mut sites = limits.with_roots(selection.sites);
            let used = Use::of(
                condition.as_ref(),
                Doing {
                    graph,
                    results: wants.results,
                    parameters: wants.parameters || !wants.paths.is_empty(),
                    counts: counts || sorts.is_some(),
                },
            )?;
            wants.results |= condition.as_ref().is_some_and(Condition::tells_value);
            let (histogram, more) = session::histogram(kernel, &mut sites, sorts.as_ref())?;
            notes.extend(more);
            let (condition, more) =
                session::conditional(kernel, &mut sites, condition.as_ref(), used)?;
            notes.extend(more);
            let (values, more) = session::values(kernel, &sites, &wants)?;
            notes.extend(more);
            let sorts_ends = histogram.as_ref().is_some_and(Histogram::exits);
            let ends = condition.as_ref().is_some_and(Conditional::is_of_ends);
            let of_module = |spec: &ArgumentSpec| spec.names_module() && spec.tells_result();
            let results = !values.results.is_empty() || wants.paths.iter().any(of_module);
            let graph = graph || sorts_ends || ends || results;
            let globs = limits.globs(&Globs { filter: filter.to_vec(), notrace });
            limits.learn(kernel, &sites);
            notes.extend(endless(kernel, &limits)?);
            let tracer = Tracer {
                name,
                text,
                globs,
                sites,
                graph,
                counts,
                by_caller,
                histogram,
                wants,
                values,
                condition,
                limits,
            };
            tracers.push(Some(tracer));
            Ok::<_, anyhow::Error>(())
        };
        let mut tasks = conditions::tasks(&self.pid, &self.comm)?;
        let follow = match &tasks {
            Some(named) if self.children => {
                let (follow, all) = Follow::new(kernel, named).context("--children")?;
                tasks = Some(all);
                Some(follow)
            }
            _ => None,
        };
        let both = |own: Option<&Condition>| {
            Condition::all(&own.into_iter().chain(&tasks).collect::<Vec<_>>())
        };
        let others = !self.event.is_empty() || self.traces_boot() || self.exits;
        let own: Vec<_> = self.tracer.iter().chain(&self.hist).chain(&self.count_callers).collect();
        let only_others = own.is_empty() && others;
        if !self.filter.is_empty() || (own.is_empty() && !only_others) {
            let globs = Globs { filter: self.filter.clone(), notrace: self.notrace.clone() };
            let text = if globs.is_empty() { "*".to_owned() } else { globs.to_string() };
            let (parameters, results) = (self.args, self.retval);
            let wants = Wants { parameters, results, paths: self.arg.clone() };
            let long = self.min_duration.map(conditions::at_least).transpose()?;
            let own: Vec<_> = self.condition.iter().chain(&long).collect();
            let condition = both(Condition::all(&own)?.as_ref())?;
            let limits = self.limits(kernel)?;
            let text = match &condition {
                Some(condition) => format!("{text}{limits} if {condition}"),
                None => format!("{text}{limits}"),
            };
            let asked = Asked {
                // Only the ends of calls are recorded where their durations decide.
                graph: self.graph && long.is_none(),
                counts: self.count,
                by_caller: false,
                wants,
                condition,
                sorts: None,
                limits,
            };
            add(Tracing::default_name(0), text, [&self.filter, &[]], asked)?;
        } else if self.condition.is_some()
            || self.args
            || self.retval
            || self.graph
            || self.count
            || !self.arg.is_empty()
        {
            bail!(
                "--graph, --args, --retval, --count, --arg and --if are about the functions of -f, and there are \
                 only those of other options: give -f, or use --tracer GLOB:ACTION"
            );
        }
        for (number, spec) in (1..).zip(&own) {
            let name = spec.name.clone().unwrap_or_else(|| Tracing::default_name(number));
            let condition = both(spec.condition.as_ref())?;
            let spec = TracerSpec { condition: condition.clone(), ..(*spec).clone() };
            let graph = spec.actions.graphs(condition.as_ref());
            let counts = spec.actions.counts();
            let by_caller = spec.actions.callers;
            let (wants, sorts) = (spec.actions.into(), spec.histogram.clone());
            let limits = Limits::default();
            let asked = Asked { graph, counts, by_caller, sorts, wants, condition, limits };
            add(name, spec.to_string(), [&spec.filter, &spec.notrace], asked)?;
        }
        if self.traces_boot() {
            let (asked, more) = times::tracers(kernel)?;
            boot_notes = more;
            for times::Asked { name, globs, graph, wants } in asked {
                let asked = Asked {
                    graph,
                    counts: false,
                    by_caller: false,
                    sorts: None,
                    wants,
                    condition: None,
                    limits: Limits::default(),
                };
                add(name.to_owned(), globs.join(","), [&globs, &[]], asked)?;
            }
        }
        if self.filter.is_empty() && (!own.is_empty() || only_others) {
            // The place of what a live filter may ask for.
            tracers.insert(0, None);
        }
        notes.append(&mut boot_notes);
        if tracers.len() > Tracing::MAX_TRACERS {
            bail!("--tracer: there can be {} tracers at most", Tracing::MAX_TRACERS);
        }
        let mut names: Vec<_> = tracers.iter().flatten().map(|tracer| &tracer.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("--tracer: two tracers are called {}: give each a name of its own", pair[0]);
        }
        let from = match &self.from {
            None => None,
            Some(name) => Some(find(kernel, name)?),
        };
        let overflow = match self.overflow {
            OverflowArg::Drop => Overflow::Drop,
            OverflowArg::Overwrite => Overflow::Overwrite,
            OverflowArg::Block => Overflow::Block(machine::WAIT_INSTRUCTION),
        };
        let returns = if self.returns.is_empty() {
            Vec::new()
        } else {
            let selection = kernel.select_with_report(&self.returns, &[]);
            unmatched.extend(selection.unmatched);
            selection.sites
        };
        let mut events = Vec::new();
        let mut patterns = Patterns::default();
        for pattern in &self.event {
            patterns.add(pattern);
            let (found, more) = session::events(kernel, pattern)?;
            notes.extend(more);
            notes.extend(session::add_events(&mut events, found));
        }
        let (found, _) =
            session::conditional(kernel, &mut Vec::new(), tasks.as_ref(), Use::Entries)?;
        let events_if = found.and_then(|found| found.general().cloned());
        let (triggers, more) = self.triggers.resolve(kernel, overflow)?;
        notes.extend(more);
        if self.context {
            kernel.check_context()?;
        }
        // Before an emulated host boots for that.
        tracer::far_memory(kernel.arch(), self.cpus.into(), self.buffer)?;
        let (context, exits) = (self.context, self.exits);
        let tracing = Tracing {
            tracers,
            from,
            overflow,
            buffer: self.buffer,
            returns,
            returns_of_modules: self.returns.clone(),
            learned: Vec::new(),
            directed: None,
            unheld: BTreeSet::new(),
            events,
            patterns,
            events_if,
            follow,
            begins: Limits::begins(kernel),
            triggers,
            context,
            exits,
        };
        if tracing.is_limited() && tracing.begins.is_none() {
            notes.push(
                "it is not seen where tasks begin: what one of them had open when it died is taken for the next one's with its stack"
                    .to_owned(),
            );
        }
        let tracers = tracing.present().filter_map(|(_, tracer)| tracer.condition.as_ref());
        let triggers = tracing.triggers.iter().filter_map(|trigger| trigger.condition.as_ref());
        for condition in tracers.chain(triggers) {
            tracing.check_followed(Some(&condition.source)).map_err(anyhow::Error::msg)?;
        }
        if tracing.is_empty() {
            return Err(kernel.no_match(unmatched).into());
        }
        if let Err((site, error)) = Plan::of(&tracing, &[]).check() {
            let site = kernel.sites().get(site);
            let name = site.and_then(|site| kernel.site_name(site)).unwrap_or("?");
            bail!("{name}: {error}: ask for fewer values of it");
        }
        // Tracers of the same functions have the same to say of them, and so have events. -n is for all.
        [&mut notes, &mut unmatched, &mut unmatched_notrace].into_iter().for_each(once);
        if self.filters_checked {
            return Ok((tracing, notes));
        }
        for glob in unmatched.iter().chain(&unmatched_notrace) {
            let near = kernel.near_functions(glob);
            say!("vmtrace: warning: no function matches {glob:?}{near}");
        }
        for (_, tracer) in tracing.present() {
            let said = |glob: &String| unmatched.contains(glob);
            let is_said = !tracer.globs.filter.is_empty() && tracer.globs.filter.iter().all(said);
            if !tracer.sites.is_empty() || tracer.names_modules() || is_said {
                continue;
            }
            let option = if tracer.text.starts_with('-') { "" } else { "--tracer " };
            say!("vmtrace: warning: {option}{} has no function", tracer.text);
        }
        Ok((tracing, notes))
    }
}

/// Leaves the first of lines that are the same.
fn once(lines: &mut Vec<String>) {
    let mut had = BTreeSet::new();
    lines.retain(|line| had.insert(line.clone()));
}

fn find(kernel: &Kernel, name: &str) -> Result<usize> {
    let mut sites = kernel
        .sites()
        .iter()
        .enumerate()
        .filter(|(_, site)| kernel.symbols().names_at(site.entry).any(|symbol| symbol == name));
    match (sites.next(), sites.next()) {
        (Some((index, _)), None) => Ok(index),
        (Some(_), Some(_)) => bail!("--from {name}: the kernel has several functions of that name"),
        (None, _) => bail!(
            "--from {name}: no such function can be traced in {}: see `vmtrace functions`",
            kernel.release()
        ),
    }
}

/// Says in which roots nothing can be recorded.
///
/// # Errors
/// When that is all of them.
fn endless(kernel: &Kernel, limits: &Limits) -> Result<Option<String>> {
    let sites = limits.endless_roots();
    let name = |site: &usize| kernel.sites().get(*site).and_then(|site| kernel.site_name(site));
    let Some((first, roots)) = sites.first().zip(limits.roots.as_ref()) else { return Ok(None) };
    let why = format!(
        "their ends are not all seen, or cannot be compared with the condition (such as {})",
        name(first).unwrap_or("?")
    );
    let of_module = |glob: &String| Functions::of(glob).module().is_some();
    if sites.len() == roots.sites.len() && !roots.globs.filter.iter().any(of_module) {
        bail!(
            "--graph-root: nothing would be recorded of {} functions: {why}: name others, as their callers",
            sites.len()
        );
    }
    Ok(Some(format!("--graph-root: what {} functions call is not recorded: {why}", sites.len())))
}

/// Says which functions are traced without some, or any, of the places where they are left. `is_chosen`: somebody has
/// named functions, and can name others.
pub(super) fn uncovered(kernel: &Kernel, tracing: &Tracing, is_chosen: bool) {
    const EXAMPLES: usize = 3;
    let sites = tracing.returning();
    let Some(exits) = (!sites.is_empty()).then(|| kernel.exits().ok()).flatten() else { return };
    let mut missing: BTreeMap<Missing, Vec<String>> = BTreeMap::new();
    let name = |site: usize| kernel.sites().get(site).and_then(|site| kernel.site_name(site));
    for &site in &sites {
        if let Coverage::Partial(reason) | Coverage::None(reason) = exits.coverage(site) {
            missing.entry(reason).or_default().extend(name(site).map(str::to_owned));
        }
    }
    let jumping = if is_chosen { tracing.jumping(kernel) } else { BTreeMap::new() };
    let jumping = jumping.iter().filter_map(|(&site, &target)| {
        let target = kernel.symbols().names_at(target).next().unwrap_or("another");
        Some(format!("{} to {target}", name(site)?))
    });
    let (all, jumping): (_, Vec<String>) = (sites.len(), jumping.collect());
    let missing = missing.into_iter().map(|(reason, names)| (reason.to_string(), names));
    let why = "they may be left by a jump to a function whose ends are not all seen";
    let jumping = (!jumping.is_empty()).then(|| (why.to_owned(), jumping));
    for (reason, names) in missing.chain(jumping) {
        let examples = names.get(..EXAMPLES.min(names.len())).unwrap_or_default().join(", ");
        let count = names.len();
        say!(
            "vmtrace: returns of {count} of {all} functions are not (all) seen: {reason} (such as {examples})"
        );
    }
}

/// Why functions of modules cannot be traced, as far as the image says.
fn no_modules(kernel: &Kernel) -> Option<String> {
    if kernel.symbols().address("do_init_module").is_none() {
        return Some("the kernel has no modules (CONFIG_MODULES)".to_owned());
    }
    kernel.btf().err().map(|error| format!("where modules are is not known: {error}"))
}
