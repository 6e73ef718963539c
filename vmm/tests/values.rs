//! Values of calls on real images: what users ask for becomes valid records. Needs the kernels of
//! `scripts/setup`.

use std::collections::HashSet;
use vmtrace::condition::Condition;
use vmtrace::emulated::cache_dir;
use vmtrace::kernel::Kernel;
use vmtrace::kernel::arguments::ArgumentSpec;
use vmtrace::serve::{TriggerAction, TriggerSpec};
use vmtrace::session::{
    Follow, Plan, Spot, Tracer, Tracing, Trigger, Use, ValuesError, Wants, conditional, values,
};
use vmtrace::stream::Shape;
use vmtrace::tracer::{Keeper, Part, Tally};
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::{Condition as Compiled, Field, Overflow};

const KERNELS: [&str; 5] = ["x86_64-6.1", "x86_64-6.12", "x86_64-7", "riscv64-6.12", "riscv64-7"];

fn kernel(name: &str) -> Kernel {
    let path = cache_dir().unwrap().join("kernels").join(name).join("vmlinuz");
    Kernel::open(&path).unwrap_or_else(|error| panic!("{name}: {error}: run scripts/setup"))
}

fn wants(paths: &[&str]) -> Wants {
    let paths = paths.iter().map(|text| ArgumentSpec::parse(text).unwrap()).collect();
    Wants { paths, ..Wants::default() }
}

// A guest with more programs than there are numbers cannot be traced at all, and a reader that
// counts other words than the program wrote shows nonsense.
#[test]
fn all_arguments_of_all_functions_can_be_recorded_at_once() {
    for name in KERNELS {
        let kernel = kernel(name);
        let sites: Vec<usize> = (0..kernel.sites().len()).collect();
        let wants = Wants { parameters: true, results: true, ..Wants::default() };
        let (values, notes) = values(&kernel, &sites, &wants).unwrap();
        assert!(notes.iter().all(|note| note.contains("raw registers")), "{notes:?}");
        let mut texts = 0;
        for recorded in values.entries.values() {
            let fields: usize = recorded.fields.iter().map(|field| field.words()).sum();
            let shapes: usize = recorded.values.iter().map(|value| value.shape.words()).sum();
            assert_eq!(fields, shapes, "{name}: {recorded:?}");
            assert_eq!(recorded.fields.len(), recorded.values.len(), "failures are told by number");
            texts +=
                recorded.values.iter().filter(|v| matches!(v.shape, Shape::Text { .. })).count();
        }
        assert!(texts > 1000 && values.entries.len() > 30_000, "{name}: {texts}");
        assert!(values.results.len() > 20_000, "{name}: {}", values.results.len());
        let tracer =
            Tracer { name: "all".into(), sites, graph: true, wants, values, ..Tracer::default() };
        let mut tracing = Tracing::of(Vec::new(), Overflow::Drop);
        tracing.tracers = vec![Some(tracer.clone()), Some(Tracer { graph: false, ..tracer })];
        assert_eq!(Plan::of(&tracing, &[]).check(), Ok(()), "{name}");
        let plan = Plan::of(&tracing, kernel.exits().unwrap().all());
        let programs: HashSet<Vec<Field>> = plan.duties.iter().map(|duty| duty.fields()).collect();
        println!("{name}: {} programs, {} of them different", plan.duties.len(), programs.len());
        assert!(plan.duties.len() < 400, "{name}: {} programs", plan.duties.len());
    }
}

// Tasks whose children are not followed are half a trace; a condition that can never hold is none.
#[test]
fn tasks_are_followed_in_every_kernel() {
    for name in KERNELS {
        let kernel = kernel(name);
        let named: Condition = "pid == 42 || comm == \"sh\"".parse().unwrap();
        let (follow, all) = Follow::new(&kernel, &named).unwrap();
        assert_eq!(all.to_string(), "(pid == 42 || comm == \"sh\") || followed");
        let mut tracing = Tracing::of(vec![1, 2], Overflow::Drop);
        assert!(tracing.check_followed(Some(&named)).is_ok());
        assert!(
            tracing.check_followed(Some(&all)).is_err_and(|error| error.contains("--children"))
        );
        tracing.follow = Some(follow);
        assert!(tracing.check_followed(Some(&all)).is_ok());
        let plan = Plan::of(&tracing, &[]);
        let follows = |part: &Part| match part.counts {
            Some(Tally::Follow { argument: Some(0), inside, .. }) => {
                Some((inside, part.condition.clone()))
            }
            _ => None,
        };
        let site = |&(site, of): &(usize, u32)| (site, &plan.duties[of as usize].parts);
        let sites: Vec<_> = plan.sites.iter().map(site).collect();
        let named = |name| {
            sites.iter().find(|&&(site, _)| kernel.site_name(&kernel.sites()[site]) == Some(name))
        };
        assert_eq!(sites.len(), 5, "{name}: {sites:?}");
        let [Some((_, parts)), Some((_, renames)), Some((_, exchanges))] =
            ["wake_up_new_task", "__set_task_comm", "exchange_tids"].map(named)
        else {
            panic!("{name}: {sites:?}")
        };
        // Where tasks are noted, they are forgotten, after all else.
        let riscv = name.starts_with("riscv64");
        let forgets = |parts: &[Part]| {
            let is = |part: &Part| part.counts == Some(Tally::Forget) && part.condition.is_none();
            parts.last().is_some_and(is)
        };
        assert!([parts, renames, exchanges].iter().all(|it| forgets(it) == riscv), "{name}");
        let noting = |parts: &[Part]| parts[..parts.len() - usize::from(riscv)].to_vec();
        let [parts, renames, exchanges] = [parts, renames, exchanges].map(|it| noting(it));
        // Who was named, and who is from now on; then all look at that task again.
        let [
            Part { counts: Some(Tally::Follow { argument: None, inside: true, .. }), .. },
            Part {
                counts: Some(Tally::Follow { argument: Some(0), inside: true, .. }),
                condition: Some(renamed),
                ..
            },
        ] = &renames[..]
        else {
            panic!("{name}: {renames:?}")
        };
        let bytes = vec![Some(b's'), Some(b'h'), Some(0)];
        let expected = Test::Text { argument: 1, bytes };
        assert_eq!(renamed.tests().collect::<Vec<_>>(), [&expected], "{name}");
        // The first thread of its process, whose process id it gets.
        let first = |part: &Part| (part.counts, part.condition.clone());
        let [(Some(Tally::Follow { argument: Some(1), inside: true, .. }), Some(exchanged))] =
            &exchanges.iter().map(first).collect::<Vec<_>>()[..]
        else {
            panic!("{name}: {exchanges:?}")
        };
        let [Some((true, joins)), Some((false, leaves))] =
            &parts.iter().map(follows).collect::<Vec<_>>()[..]
        else {
            panic!("{name}: {parts:?}")
        };
        let tests =
            |condition: &Option<_>| condition.as_ref().map(|it: &Compiled| it.tests().count());
        assert_eq!((tests(joins), tests(leaves)), (Some(3), Some(3)), "{name}");
        let followed = |condition: &Option<Compiled>| {
            let last = condition.as_ref().and_then(|it| it.tests().last().cloned());
            match last {
                Some(Test::Followed { inside, .. }) => inside,
                other => panic!("{name}: {other:?}"),
            }
        };
        assert!(followed(joins) && !followed(leaves), "{name}");
        assert_eq!(joins.as_ref(), Some(exchanged), "{name}");
        // Programs know strangers by what they are asked for: with other conditions, too.
        for text in ["", "cpu == 0 && ", "(cpu == 0 || pid == 3) && "] {
            let condition = format!("{text}({all})").parse().unwrap();
            let (found, _) =
                conditional(&kernel, &mut vec![1], Some(&condition), Use::Entries).unwrap();
            let found = found.unwrap().general().cloned().unwrap();
            let is_there = |condition: &Compiled| Some(condition) == joins.as_ref();
            let within = match &found {
                Compiled::All(list) => list.iter().any(is_there),
                _ => false,
            };
            assert!(is_there(&found) || within, "{name}: {found:?}");
        }
        // A name and a number: a new name alone does not tell.
        let both: Condition = "pid == 42 && comm == \"sh\"".parse().unwrap();
        tracing.follow = Some(Follow::new(&kernel, &both).unwrap().0);
        let plan = Plan::of(&tracing, &[]);
        let forgets = |part: &Part| part.counts == Some(Tally::Forget);
        assert!(!plan.duties.iter().any(|duty| duty.parts.iter().any(forgets)), "{name}");
    }
}

// A condition that is looked at where it is not known, or compared as another type, is another one; a function
// whose ends are not all seen has calls that nobody decides about.
#[test]
fn what_only_the_end_of_a_call_tells_is_looked_at_there() {
    for name in KERNELS {
        let kernel = kernel(name);
        let planned = |globs: &[&str], text: &str| {
            let globs: Vec<String> = globs.iter().map(|&glob| glob.to_owned()).collect();
            let mut sites = kernel.select(&globs, &[]).unwrap();
            let written: Condition = text.parse().unwrap();
            let (condition, notes) = conditional(&kernel, &mut sites, Some(&written), Use::Ends)?;
            let tracer = Tracer { sites, graph: true, condition, ..Tracer::default() };
            let mut tracing = Tracing::of(Vec::new(), Overflow::Drop);
            tracing.tracers = vec![Some(tracer)];
            Ok::<_, vmtrace::session::ConditionalError>((
                Plan::of(&tracing, kernel.exits().unwrap().all()),
                notes,
            ))
        };
        // Nothing at the entry where the value alone is looked at.
        let (plan, _) = planned(&["vfs_read"], "retval < 0").unwrap();
        assert_eq!((plan.sites.len(), plan.duties.is_empty()), (0, false), "{name}");
        let part = &plan.duties[plan.exits[0].1 as usize].parts[0];
        assert_eq!((&part.fields[..], part.counts), (&[Field::Stack][..], None), "{name}");
        let value = Operand::Value { bytes: 8, signed: true };
        let (relation, tests) = (Relation::Less, part.condition.as_ref().unwrap());
        let expected = [Test::Number { operand: value, relation, value: 0 }];
        assert!(tests.tests().eq(expected.iter()), "{name}: {tests:?}");

        let text = "duration >= 2ms && count > 4K && retval == -1 && pid == 1";
        let (plan, _) = planned(&["vfs_read"], text).unwrap();
        let [(_, duty)] = plan.sites[..] else { panic!("{name}: {plan:?}") };
        let entry = &plan.duties[duty as usize].parts[0];
        assert_eq!(entry.counts, Some(Tally::Open(Keeper::Tracer(0))), "{name}");
        assert_eq!(entry.condition.as_ref().unwrap().tests().count(), 2, "{name}");
        let part = &plan.duties[plan.exits[0].1 as usize].parts[0];
        assert!(part.fields.contains(&Field::Duration) && part.needs_open_calls(), "{name}");
        let numbers = part.condition.as_ref().unwrap().tests().map(|test| match test {
            Test::Number { value, .. } => *value,
            other => panic!("{other:?}"),
        });
        assert_eq!(numbers.collect::<Vec<_>>(), [2_000_000, u64::MAX], "{name}");

        // All functions together, but for those of which nobody could know.
        let (plan, notes) = planned(&["vfs_*", "do_*"], "retval < 0").unwrap();
        assert!(plan.exits.len() > 200, "{name}: {}", plan.exits.len());
        let jumps = notes.iter().any(|note| note.contains("by a jump to another"));
        // There are none on riscv64.
        assert_eq!(jumps, name.starts_with("x86_64"), "{name}: {notes:?}");
        for why in ["returns nothing", "never below 0"] {
            assert!(notes.iter().any(|note| note.contains(why)), "{name}: {notes:?}");
        }
        let error = |text: &str| match planned(&["vfs_read"], text) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{name}: {text}"),
        };
        assert!(error("count > 4K || retval < 0").contains("each side on its own"), "{name}");
        assert!(error("duration == 1ms").contains("use <, <=, > or >="), "{name}");
        assert!(error("duration > 5").contains("500ns, 10us"), "{name}");
        assert!(error("retval == x").contains("is not a number"), "{name}");
        let refused = error("pid == 1 && duration > 1h");
        assert!(refused.contains("at character 13: \"duration > 1h\""), "{name}: {refused}");
        let mut sites = vec![0];
        let written: Condition = "retval < 0".parse().unwrap();
        for used in [Use::Entries, Use::Calls] {
            let refused = conditional(&kernel, &mut sites, Some(&written), used).unwrap_err();
            assert!(refused.to_string().contains("args.retval"), "{name}: {refused}");
        }
    }
}

// A trigger that looks where nothing is known yet fires at other calls; one that is behind the record of a return
// ends the trace one record late.
#[test]
fn triggers_look_at_ends_before_those_are_recorded() {
    for name in KERNELS {
        let kernel = kernel(name);
        let exits = kernel.exits().unwrap().all();
        let trigger = |number: u16, text: &str| {
            let spec: TriggerSpec = text.parse().unwrap();
            let spot = Spot::find(&kernel, &spec).unwrap();
            Trigger {
                id: u32::from(number) + 1,
                action: TriggerAction::Mark,
                text: text.to_owned(),
                sites: spot.sites,
                globs: spot.globs,
                condition: spot.condition,
                call: spec.call,
                left: spec.call,
                number,
                kept: number + 7,
                command: None,
                live: false,
                fired: false,
            }
        };
        let sites = kernel.select(&["vfs_read".to_owned()], &[]).unwrap();
        let own = sites[0];
        let mut tracing = Tracing::of(sites, Overflow::Drop);
        tracing.triggers = vec![
            trigger(0, "vfs_read if retval < 0"),
            trigger(1, "vfs_read:3 if duration > 1ms && count > 4K"),
            trigger(2, "vfs_read"),
        ];
        assert_eq!((tracing.wants_exits(), tracing.returning()), (true, vec![own]), "{name}");
        let counts = |plan: &Plan, duty: u32| -> Vec<Option<Tally>> {
            plan.duties[duty as usize].parts.iter().map(|part| part.counts).collect()
        };
        let stop = |number, since| Some(Tally::Stop { number, since });
        let keeper = Keeper::Trigger(8);
        let plan = Plan::of(&tracing, exits);
        let [(site, duty)] = plan.sites[..] else { panic!("{name}: {plan:?}") };
        let entry = [Some(Tally::Open(keeper)), stop(2, None), None];
        assert_eq!((site, counts(&plan, duty)), (own, entry.to_vec()), "{name}");
        let own_exits = exits.iter().filter(|exit| exit.site as usize == own).count();
        assert!(own_exits > 0 && plan.exits.len() == own_exits, "{name}");
        let end = [stop(0, None), stop(1, Some(keeper))];
        for &(exit, duty) in &plan.exits {
            assert_eq!(counts(&plan, duty), end, "{name}");
            let tests = plan.duties[duty as usize].parts[1].condition.as_ref().unwrap();
            assert_eq!((exits[exit].site as usize, tests.tests().count()), (own, 1), "{name}");
        }
        // Who records the return does that behind it, of the same function alone.
        tracing.tracers[0].as_mut().unwrap().graph = true;
        let plan = Plan::of(&tracing, exits);
        let with_record = [end[0], end[1], None];
        assert!(plan.exits.iter().all(|&(_, duty)| counts(&plan, duty) == with_record), "{name}");
        tracing.tracers[0] = None;
        // What has been done is looked for no more.
        tracing.triggers[1].fired = true;
        let plan = Plan::of(&tracing, exits);
        assert_eq!(counts(&plan, plan.sites[0].1), [stop(2, None)], "{name}");
        assert!(plan.exits.iter().all(|&(_, duty)| counts(&plan, duty) == end[..1]), "{name}");
        tracing.triggers[0].fired = true;
        assert!(!tracing.wants_exits() && Plan::of(&tracing, exits).exits.is_empty(), "{name}");
        let refused = |text: &str| Spot::find(&kernel, &text.parse().unwrap()).unwrap_err();
        let both = refused("vfs_read if count > 4K || retval < 0").to_string();
        assert!(both.contains("each side on its own"), "{name}: {both}");
    }
}

// What is asked for by name and is not there must not be a trace without it.
#[test]
fn what_cannot_be_recorded_is_said_before_anything_boots() {
    for name in ["x86_64-6.12", "riscv64-7"] {
        let kernel = kernel(name);
        let sites = |globs: &[&str]| {
            let globs: Vec<String> = globs.iter().map(|&glob| glob.to_owned()).collect();
            kernel.select(&globs, &[]).unwrap()
        };
        let reads = sites(&["vfs_read", "vfs_write"]);
        let error =
            |paths: &[&str]| values(&kernel, &reads, &wants(paths)).unwrap_err().to_string();
        assert!(error(&["vfs_read: fille"]).contains("file"));
        assert!(error(&["vfs_raed: file"]).contains("vfs_read"));
        assert!(error(&["vfs_open: file"]).contains("-f"));
        assert!(error(&["vfs_read: file->f_path.dentry->d_nme"]).contains("d_name"));
        let long = "file->f_path.dentry->d_name.name:120";
        let many = format!("vfs_read: a={long}, b={long}");
        let error = values(&kernel, &reads, &wants(&[&many])).unwrap_err();
        assert!(matches!(error, ValuesError::TooMany { words: 30, .. }), "{error}");
        // One of several functions is enough, and the others are named.
        let (found, notes) = values(&kernel, &reads, &wants(&["vfs_*: buf[0], count"])).unwrap();
        assert_eq!((found.entries.len(), notes.len()), (2, 0));
        let both = sites(&["vfs_read", "vfs_fsync"]);
        let (found, notes) = values(&kernel, &both, &wants(&["vfs_*: count"])).unwrap();
        assert_eq!(found.entries.len(), 1);
        assert!(notes.len() == 1 && notes[0].contains("vfs_fsync"), "{notes:?}");
    }
}
