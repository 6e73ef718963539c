//! From a condition as people write it to what programs look at.

use super::ends::{Parted, Use, is_parameter};
use super::literals::{comm, number};
use super::values::Known;
use crate::check::parse_time;
use crate::condition::{Comparison, Condition, DURATION, Expression, FOLLOWED, RETURNED, VALUE};
use crate::kernel::Kernel;
use crate::kernel::arguments::{Fetch, Shape};
use crate::tracer::TaskOffsets;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use vmtrace_trampolines::Condition as Compiled;
use vmtrace_trampolines::condition::{Operand, Relation, Test, extended};

/// Names that a note gives for a reason.
const EXAMPLES: usize = 3;
/// Before a parameter that is called as something else is.
const PARAMETER: &str = "args.";

/// A tracer's condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// As it was written.
    pub source: Condition,
    of: Of,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Of {
    /// The same at every function.
    All(Compiled),
    /// By site: parameters are elsewhere at each.
    Sites(Arc<FxHashMap<usize, Compiled>>),
    /// The same of the ends of calls.
    Ends(Arc<FxHashMap<usize, Parted>>),
}

/// Why a condition cannot be.
#[derive(Debug, thiserror::Error)]
#[error("condition {condition:?}, {place}: {problem}")]
pub struct ConditionalError {
    condition: String,
    place: String,
    problem: String,
    /// What is the same of all functions of which it is said.
    reason: String,
}

impl Conditional {
    /// What it is for calls of the function at a site.
    pub(super) fn at(&self, site: usize) -> Option<Compiled> {
        match &self.of {
            Of::All(condition) => Some(condition.clone()),
            // Nothing is recorded of a function that has not what is asked for.
            Of::Sites(sites) => {
                Some(sites.get(&site).cloned().unwrap_or(Compiled::Any(Vec::new())))
            }
            Of::Ends(_) => Some(Compiled::Any(Vec::new())),
        }
    }

    /// Whether it is about how calls end, of which nothing else is recorded then.
    #[must_use]
    pub fn is_of_ends(&self) -> bool {
        matches!(self.of, Of::Ends(_))
    }

    /// What has to hold where for the end of a call of the function at a site to be recorded.
    pub(super) fn ends(&self, site: usize) -> Option<&Parted> {
        match &self.of {
            Of::Ends(sites) => sites.get(&site),
            Of::All(_) | Of::Sites(_) => None,
        }
    }

    /// Whether it is the same at every function.
    pub(super) fn is_general(&self) -> bool {
        matches!(self.of, Of::All(_))
    }

    /// Has it be one of more functions, at `sites`, which lose those that have no such parameters or returns; notes
    /// say which.
    pub(super) fn extend(
        &mut self,
        kernel: &Kernel,
        known: &dyn Known,
        sites: &mut Vec<usize>,
    ) -> Vec<String> {
        let Self { source: condition, of } = self;
        let used = if matches!(of, Of::Ends(_)) { Use::Ends } else { Use::Entries };
        let mut resolver = Resolver { kernel, known, condition, used, site: None, tasks: None };
        match of {
            Of::All(_) => Vec::new(),
            Of::Sites(all) => {
                let (found, without) = of_each(sites, |site| resolver.entry(site));
                Arc::make_mut(all).extend(found);
                left_out(known, without)
            }
            Of::Ends(all) => {
                let (found, without) = of_each(sites, |site| resolver.ends(site));
                let mut notes = left_out(known, without);
                // That their sites stay unchanged is told at boot, beside how many there are.
                notes.extend(jumping(known, by_value(&found)));
                Arc::make_mut(all).extend(found);
                notes
            }
        }
    }

    /// What it is where there is no function: for events.
    #[must_use]
    pub fn general(&self) -> Option<&Compiled> {
        match &self.of {
            Of::All(condition) => Some(condition),
            Of::Sites(_) | Of::Ends(_) => None,
        }
    }
}

/// Resolves a condition, if there is one, for the functions at `sites`, which loses those that have no such
/// parameters or returns; notes say which.
///
/// # Errors
/// When it can hold for none.
pub fn conditional(
    kernel: &Kernel,
    sites: &mut Vec<usize>,
    condition: Option<&Condition>,
    used: Use,
) -> Result<(Option<Conditional>, Vec<String>), ConditionalError> {
    conditional_of(kernel, kernel, sites, condition, used)
}

/// The same of functions of which `known` knows more than the kernel's image.
pub(super) fn conditional_of(
    kernel: &Kernel,
    known: &dyn Known,
    sites: &mut Vec<usize>,
    condition: Option<&Condition>,
    used: Use,
) -> Result<(Option<Conditional>, Vec<String>), ConditionalError> {
    let Some(condition) = condition else { return Ok((None, Vec::new())) };
    let mut resolver = Resolver { kernel, known, condition, used, site: None, tasks: None };
    let source = condition.clone();
    if used != Use::Ends && !condition.is_about(is_parameter) {
        let of = Of::All(resolver.expression(condition.expression(), true)?);
        return Ok((Some(Conditional { source, of }), Vec::new()));
    }
    if used == Use::Ends {
        let (found, without) = of_each(sites, |site| resolver.ends(site));
        let without = for_some(found.is_empty(), without)?;
        let mut notes = left_out(known, without);
        notes.extend(of_found(known, &found));
        return Ok((Some(Conditional { source, of: Of::Ends(Arc::new(found)) }), notes));
    }
    let (found, without) = of_each(sites, |site| resolver.entry(site));
    let notes = left_out(known, for_some(found.is_empty(), without)?);
    Ok((Some(Conditional { source, of: Of::Sites(Arc::new(found)) }), notes))
}

/// Notes on functions whose ends are looked at.
fn of_found(known: &dyn Known, found: &FxHashMap<usize, Parted>) -> Vec<String> {
    let mut notes: Vec<String> = jumping(known, by_value(found)).into_iter().collect();
    let only_left = found.values().filter(|parted| parted.entry.is_none()).count();
    if only_left > 0 {
        notes.push(format!(
            "{only_left} functions are looked at only where they return: their sites stay unchanged"
        ));
    }
    notes
}

/// Functions (sites) of which it is looked at what they return.
fn by_value(found: &FxHashMap<usize, Parted>) -> impl Iterator<Item = usize> {
    found.iter().filter(|(_, parted)| parted.by_value).map(|(&site, _)| site)
}

/// A note on those of these functions that may be left by a jump to another one.
fn jumping(known: &dyn Known, sites: impl Iterator<Item = usize>) -> Option<String> {
    let mut sites: Vec<usize> = sites.filter(|&site| known.leaves(site) == Ok(true)).collect();
    sites.sort_unstable();
    let names = sites.iter().take(EXAMPLES).map(|&site| known.name(site));
    let names = names.collect::<Vec<_>>().join(", ");
    (!sites.is_empty()).then(|| {
        format!(
            "{} functions may be left by a jump to another (such as {names}), which returns in their place: such \
             calls are not compared, and a note at the end gives their number; trace what they jump \
             to",
            sites.len()
        )
    })
}

/// Why there can be no such thing for some functions, and which.
type Without = Vec<(ConditionalError, Vec<usize>)>;

/// What it is at each of these sites, which lose those for which there can be no such thing.
fn of_each<T>(
    sites: &mut Vec<usize>,
    mut of: impl FnMut(usize) -> Result<T, ConditionalError>,
) -> (FxHashMap<usize, T>, Without) {
    let mut found = FxHashMap::default();
    let mut without: Without = Vec::new();
    sites.retain(|&site| match of(site) {
        Ok(compiled) => {
            found.insert(site, compiled);
            true
        }
        Err(error) => {
            let same = without.iter_mut().find(|(same, _)| same.reason == error.reason);
            match same {
                Some((_, sites)) => sites.push(site),
                None => without.push((error, vec![site])),
            }
            false
        }
    });
    (found, without)
}

/// That a condition is one of any function at all.
fn for_some(is_of_none: bool, mut without: Without) -> Result<Without, ConditionalError> {
    if is_of_none && !without.is_empty() { Err(without.remove(0).0) } else { Ok(without) }
}

/// Notes on functions that are left out.
fn left_out(known: &dyn Known, without: Without) -> Vec<String> {
    let note = |(error, sites): (ConditionalError, Vec<usize>)| {
        let names = sites.iter().take(EXAMPLES).map(|&site| known.name(site));
        let (count, names) = (sites.len(), names.collect::<Vec<_>>().join(", "));
        format!("{count} functions are not traced (such as {names}): {}", error.problem)
    };
    without.into_iter().map(note).collect()
}

/// Bytes of an integer that programs can look at, and whether it has a sign.
pub(super) fn integer(shape: &Shape) -> Option<(u8, bool)> {
    let (bytes, signed) = match shape {
        Shape::Signed { bytes } => (*bytes, true),
        Shape::Unsigned { bytes } | Shape::Raw { bytes } => (*bytes, false),
        Shape::Bool | Shape::Char => (1, false),
        Shape::Enum { bytes, signed, .. } => (*bytes, *signed),
        _ => return None,
    };
    matches!(bytes, 1 | 2 | 4 | 8).then_some((bytes, signed))
}

struct Resolver<'a> {
    kernel: &'a Kernel,
    known: &'a dyn Known,
    condition: &'a Condition,
    used: Use,
    /// The function, where there is one.
    site: Option<usize>,
    tasks: Option<TaskOffsets>,
}

impl Resolver<'_> {
    fn error(&self, at: usize, problem: impl Into<String>) -> ConditionalError {
        ConditionalError {
            condition: self.condition.text().to_owned(),
            place: self.condition.place(at),
            problem: problem.into(),
            reason: String::new(),
        }
    }

    /// What holds when the function at a site is entered.
    fn entry(&mut self, site: usize) -> Result<Compiled, ConditionalError> {
        self.site = Some(site);
        self.expression(self.condition.expression(), true)
    }

    /// What holds where of the ends of calls of the function at a site.
    fn ends(&mut self, site: usize) -> Result<Parted, ConditionalError> {
        if let Err(why) = self.known.leaves(site) {
            let reason = format!("where it is left is not (always) seen: {why}");
            let problem = format!("{}: {reason}", self.known.name(site));
            return Err(ConditionalError { reason, ..self.error(0, problem) });
        }
        self.site = Some(site);
        let compiled = self.expression(self.condition.expression(), true)?;
        Parted::of(compiled).ok_or_else(|| {
            self.error(
                0,
                "one || has both what is known when a function is entered (arguments, cpu) and what is \
                 known when it is left (retval, duration): ask for each side on its own, as in --tracer \
                 'GLOB if ONE' --tracer 'GLOB if OTHER'",
            )
        })
    }

    /// What holds when the expression is what `when` says.
    fn expression(
        &mut self,
        expression: &Expression,
        when: bool,
    ) -> Result<Compiled, ConditionalError> {
        let mut list = |list: &[Expression]| {
            list.iter().map(|one| self.expression(one, when)).collect::<Result<Vec<_>, _>>()
        };
        Ok(match (expression, when) {
            (Expression::All(all), true) | (Expression::Any(all), false) => {
                Compiled::All(list(all)?)
            }
            (Expression::Any(all), true) | (Expression::All(all), false) => {
                Compiled::Any(list(all)?)
            }
            (Expression::Not(one), _) => self.expression(one, !when)?,
            (Expression::Compare(one), _) => self.comparison(one, when)?,
        })
    }

    fn comparison(&mut self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        let task = match one.operand.as_str() {
            "comm" => return self.comm(one, when),
            "caller" => return self.caller(one, when),
            FOLLOWED => return self.followed(one, when),
            VALUE | RETURNED => return self.value(one, when),
            DURATION => return self.duration(one, when),
            "cpu" if self.used == Use::Calls => {
                let problem = "a task may be on another CPU when the function returns: leave out \
                               cpu, or the returns (--graph, --retval)";
                return Err(self.error(one.at, problem));
            }
            "cpu" => return self.number(one, when, Operand::Cpu),
            "pid" => self.offsets(one)?.pid,
            "tgid" => self.offsets(one)?.tgid,
            _ => return self.parameter(one, when),
        };
        let offset = u32::try_from(task).map_err(|_| self.error(one.at, "is out of reach"))?;
        self.number(one, when, Operand::Task(offset))
    }

    fn offsets(&mut self, one: &Comparison) -> Result<TaskOffsets, ConditionalError> {
        let found = match self.tasks {
            Some(tasks) => Ok(tasks),
            None => TaskOffsets::find(self.kernel),
        };
        let tasks = found.map_err(|error| self.error(one.at, error.to_string()))?;
        Ok(*self.tasks.insert(tasks))
    }

    fn parameter(&self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        let refused = |problem: String| Err(self.error(one.at, problem));
        let Some(site) = self.site else {
            return refused(format!("{:?} is known for functions only", one.operand));
        };
        if self.used == Use::Calls {
            return refused(format!(
                "{:?} is known when a function is entered, and not when it returns: leave out the \
                 returns (--graph, --retval)",
                one.operand
            ));
        }
        let path = one.operand.strip_prefix(PARAMETER).unwrap_or(&one.operand);
        let value = match self.known.path(site, path) {
            Ok(value) => value,
            Err(error) => return refused(format!("{}: {error}", self.known.name(site))),
        };
        let Fetch::Argument(number) = value.fetch else {
            return refused(format!(
                "{path:?} is not itself an argument: conditions compare integers and pointers \
                 that are arguments"
            ));
        };
        let operand = |bytes, signed| Operand::Argument { number, bytes, signed };
        self.typed(one, when, &value.shape, operand)
    }

    /// An integer or a pointer of this type.
    fn typed(
        &self,
        one: &Comparison,
        when: bool,
        shape: &Shape,
        operand: impl Fn(u8, bool) -> Operand,
    ) -> Result<Compiled, ConditionalError> {
        let width = match shape {
            Shape::Pointer | Shape::Text => Some((8, false)),
            shape => integer(shape),
        };
        let Some((bytes, signed)) = width else {
            let problem = format!("{:?} is neither an integer nor a pointer", one.operand);
            return Err(self.error(one.at, problem));
        };
        let names = match shape {
            Shape::Enum { names, .. } => &names[..],
            _ => &[],
        };
        let number = names.iter().find(|(_, name)| *name == one.value).map(|(number, _)| {
            if signed { i128::from(*number) } else { i128::from(number.cast_unsigned()) }
        });
        match number {
            Some(number) => self.compared(one, when, operand(bytes, signed), number),
            None => self.number(one, when, operand(bytes, signed)),
        }
    }

    /// That what is looked at is known when a function is left.
    fn at_end(&self, one: &Comparison) -> Result<(), ConditionalError> {
        match self.used {
            Use::Ends => Ok(()),
            Use::Entries | Use::Calls => Err(self.error(
                one.at,
                format!(
                    "{0} is known when a function is left, and this is decided before: leave it out (a \
                     parameter of that name is {PARAMETER}{0})",
                    one.operand
                ),
            )),
        }
    }

    /// What is returned.
    fn value(&self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        self.at_end(one)?;
        let because = |function: &str, why: String| ConditionalError {
            reason: why.clone(),
            ..self.error(one.at, format!("{function}: {why}"))
        };
        let Some(site) = self.site else {
            return Err(self.error(one.at, format!("{VALUE} is known for functions only")));
        };
        let function = self.known.name(site);
        let prototype = match self.known.prototype(site) {
            Ok(prototype) => prototype,
            Err(why) => return Err(because(&function, why.to_string())),
        };
        let Some(result) = prototype.result else {
            return Err(because(&function, "it returns nothing".to_owned()));
        };
        let shape = match result.fetch {
            Fetch::Result => &result.shape,
            // A text, say: what is returned is where it is.
            _ => &Shape::Pointer,
        };
        let signed = integer(shape).is_some_and(|(_, signed)| signed);
        if !signed
            && matches!(one.relation, Relation::Less | Relation::GreaterEqual)
            && number(&one.value) == Some(0)
        {
            let why = "what it returns has no sign, and is never below 0 (for pointers that \
                       are errors use retval >= 0xfffffffffffff001)";
            return Err(because(&function, why.to_owned()));
        }
        self.typed(one, when, shape, |bytes, signed| Operand::Value { bytes, signed })
    }

    /// How long it took.
    fn duration(&self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        self.at_end(one)?;
        let relation = if when { one.relation } else { one.relation.inverse() };
        if !matches!(
            relation,
            Relation::Less | Relation::LessEqual | Relation::Greater | Relation::GreaterEqual
        ) {
            let problem =
                "a duration is hardly ever exactly this: use <, <=, > or >=, as in duration > 1ms";
            return Err(self.error(one.at, problem));
        }
        let Some(value) = parse_time(&one.value) else {
            let problem =
                format!("{:?} is not a time: use one such as 500ns, 10us, 5ms or 2s", one.value);
            return Err(self.error(one.at, problem));
        };
        Ok(Compiled::Test(Test::Number { operand: Operand::Duration, relation, value }))
    }

    fn number(
        &self,
        one: &Comparison,
        when: bool,
        operand: Operand,
    ) -> Result<Compiled, ConditionalError> {
        let Some(number) = number(&one.value) else {
            let problem =
                format!("{:?} is not a number: use one such as 42, -1, 0x1f or 4K", one.value);
            return Err(self.error(one.at, problem));
        };
        self.compared(one, when, operand, number)
    }

    fn compared(
        &self,
        one: &Comparison,
        when: bool,
        operand: Operand,
        number: i128,
    ) -> Result<Compiled, ConditionalError> {
        let relation = one.relation;
        let (bytes, signed) = operand.width();
        let bits = 8 * u32::from(bytes);
        let (least, most) = (-(1_i128 << (bits - 1)), (1_i128 << bits) - 1);
        // A pattern of bits may be written with or without a sign; an order has one.
        let ordered = !matches!(
            relation,
            Relation::Equal | Relation::NotEqual | Relation::Common | Relation::NoneCommon
        );
        let (least, most) = match (ordered, signed) {
            (false, _) => (least, most),
            (true, true) => (least, most >> 1),
            (true, false) => (0, most),
        };
        if number < least || number > most {
            let problem = format!(
                "{} is an integer of {bytes} bytes{}, from {least} to {most}",
                one.operand,
                if signed { "" } else { " without a sign" },
            );
            return Err(self.error(one.at, problem));
        }
        #[allow(clippy::cast_possible_truncation, reason = "its bits")]
        let low = number as i64;
        let value = extended(low.cast_unsigned(), bytes, signed);
        let relation = if when { relation } else { relation.inverse() };
        Ok(Compiled::Test(Test::Number { operand, relation, value }))
    }

    /// Whether it has to be equal, of what can be equal or not.
    fn equal(&self, one: &Comparison, when: bool) -> Result<bool, ConditionalError> {
        match one.relation {
            Relation::Equal => Ok(when),
            Relation::NotEqual => Ok(!when),
            _ => Err(self.error(one.at, format!("{} can be == or !=", one.operand))),
        }
    }

    fn comm(&mut self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        let equal = self.equal(one, when)?;
        let bytes = comm(&one.value).map_err(|problem| self.error(one.at, problem))?;
        let offset = u32::try_from(self.offsets(one)?.comm);
        let offset = offset.map_err(|_| self.error(one.at, "is out of reach"))?;
        Ok(Compiled::Test(Test::Bytes { offset, bytes, equal }))
    }

    fn followed(&mut self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        let equal = self.equal(one, when)?;
        let inside = match one.value.as_str() {
            "1" => equal,
            "0" => !equal,
            _ => return Err(self.error(one.at, format!("{FOLLOWED} is 0 or 1"))),
        };
        let pid = u32::try_from(self.offsets(one)?.pid);
        let pid = pid.map_err(|_| self.error(one.at, "is out of reach"))?;
        Ok(Compiled::Test(Test::Followed { pid, inside }))
    }

    fn caller(&self, one: &Comparison, when: bool) -> Result<Compiled, ConditionalError> {
        let inside = self.equal(one, when)?;
        let symbols = self.kernel.symbols();
        let mut tests = Vec::new();
        for start in symbols.addresses(&one.value) {
            let len = symbols.next_after(start).map(|end| end.wrapping_sub(start));
            let len = len.and_then(|len| u32::try_from(len).ok()).filter(|&len| len > 0);
            let Some(len) = len else { continue };
            tests.push(Compiled::Test(Test::Caller { start, len, inside }));
        }
        if tests.is_empty() {
            let near = self.kernel.near_functions(&one.value);
            let problem = format!("the kernel has no function {:?}{near}", one.value);
            return Err(self.error(one.at, problem));
        }
        // Of several functions of one name, any.
        Ok(if inside { Compiled::Any(tests) } else { Compiled::All(tests) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::values::tests::{COUNTS, OfModule};
    use super::*;

    // A function of which nothing is known must not be traced as if its condition held, nor with the argument of another.
    #[test]
    fn functions_of_a_module_have_parameters_of_their_own() {
        let of_module = OfModule::new();
        let kernel = &of_module.0;
        let of = |text: &str| {
            let written: Condition = text.parse().unwrap();
            let found = conditional(kernel, &mut Vec::new(), Some(&written), Use::Entries).unwrap();
            found.0.unwrap()
        };
        let mut condition = of("count > 4K && pid == 1");
        let mut own = vec![COUNTS, COUNTS + 1];
        let notes = condition.extend(kernel, &of_module, &mut own);
        assert_eq!(own, [COUNTS]);
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("1 functions are not traced (such as other [m]): "), "{note}");
        let tests = condition.at(COUNTS).unwrap();
        let operand = Operand::Argument { number: 2, bytes: 8, signed: false };
        let expected = Test::Number { operand, relation: Relation::Greater, value: 4096 };
        assert_eq!((tests.tests().next(), tests.tests().count()), (Some(&expected), 2));
        assert_eq!(condition.at(COUNTS + 1), Some(Compiled::Any(Vec::new())), "it never holds");
        let mut none = vec![COUNTS + 1, COUNTS + 2];
        let notes = condition.extend(kernel, &of_module, &mut none);
        assert!(none.is_empty() && notes.len() == 1, "{notes:?}");
        assert!(notes[0].starts_with("2 functions are not traced (such as other [m]"), "{notes:?}");
        let mut all = own.clone();
        let notes = of("pid == 1").extend(kernel, &of_module, &mut all);
        assert_eq!((all, notes), (own, Vec::new()), "the same at every function");
    }

    // Calls of which no end is seen would stay open for ever, and what is not known to return an integer would be
    // compared as if it did.
    #[test]
    fn functions_of_a_module_are_left_as_they_are_known_to_be() {
        let of_module = OfModule::new();
        let kernel = &of_module.0;
        let extended = |text: &str| {
            let written: Condition = text.parse().unwrap();
            let found = conditional(kernel, &mut Vec::new(), Some(&written), Use::Ends).unwrap();
            let (mut condition, mut own) = (found.0.unwrap(), vec![COUNTS, COUNTS + 1]);
            let notes = condition.extend(kernel, &of_module, &mut own);
            (condition, own, notes)
        };
        let (condition, own, notes) = extended("duration > 1us && count > 4K");
        assert_eq!(own, [COUNTS]);
        let parted = condition.ends(COUNTS).unwrap();
        let duration =
            Test::Number { operand: Operand::Duration, relation: Relation::Greater, value: 1000 };
        assert_eq!(parted.end.tests().collect::<Vec<_>>(), [&duration]);
        assert_eq!(parted.entry.as_ref().map(|entry| entry.tests().count()), Some(1));
        assert!(!parted.by_value && condition.ends(COUNTS + 1).is_none());
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("1 functions are not traced (such as other [m]): "), "{note}");
        assert!(note.ends_with("is not (always) seen: it never returns"), "{note}");
        // Of each reason one.
        let (condition, own, notes) = extended("retval < 0");
        assert!(own.is_empty() && condition.is_of_ends() && condition.ends(COUNTS).is_none());
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("(such as counts [m])"), "{notes:?}");
    }
}
