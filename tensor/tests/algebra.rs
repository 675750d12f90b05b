//! The layout algebra (steps, routes, reshape, inference, repairs) against golden data: every case of every section, with the numbers
//! of cases.
//!
//! The data was written by a brute-force model that runs each accepted case on simulated ranks, forward and backward. Mutations verify
//! that the checks detect wrong rules.

use serde_json::Value;
use shardgrad_dist::{Axis, AxisSet, Mesh};
use shardgrad_kernels::DType;
use shardgrad_tensor::{
    Dim, ImplicitStep, Inference, Layout, Placement, Refusal, RouteCache, Rule, Signature, Step, adjoint,
    elements_moved, elements_moved_backward, infer, repairs, reshape_layout, route,
};
use std::collections::BTreeMap;

fn golden() -> Value {
    serde_json::from_str(include_str!("data/algebra_cases.json")).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("`{key}` is a list"))
}

fn number(value: &Value, key: &str) -> usize {
    value[key].as_u64().unwrap_or_else(|| panic!("`{key}` is a number in {value}")) as usize
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("`{key}` is a text in {value}"))
}

fn texts<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    list(value, key).iter().map(|t| t.as_str().expect("a list of texts")).collect()
}

fn mesh_of(case: &Value) -> Mesh {
    let axes = case["mesh"].as_object().expect("a mesh is an object");
    let axes: Vec<(&str, usize)> =
        axes.iter().map(|(a, n)| (a.as_str(), n.as_u64().unwrap() as usize)).collect();
    Mesh::new(&axes).unwrap()
}

fn state_of(value: &Value) -> Placement {
    match value.as_str() {
        Some("=") => Placement::Invariant,
        Some("~") => Placement::Replicate,
        Some("+") => Placement::Partial,
        Some(other) => panic!("`{other}` is no state"),
        None => Placement::Shard(value.as_u64().expect("a dim") as usize),
    }
}

/// A state in the notation of the golden data.
fn written(state: Placement) -> String {
    state.to_string().trim_start_matches('@').to_string()
}

fn written_step(step: ImplicitStep, mesh: &Mesh) -> String {
    format!("{} {} {}", step.arg, mesh.name(step.axis), written(step.to))
}

#[test]
fn layout_texts_round_trip() {
    let golden = golden();
    let (ok, bad) = (texts(&golden["texts"], "ok"), texts(&golden["texts"], "bad"));
    for form in &ok {
        let names =
            form.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| w.starts_with(char::is_alphabetic));
        let axes: Vec<(&str, usize)> = names.skip(1).map(|name| (name, 2)).collect();
        let layout = Layout::parse(form, &Mesh::new(&axes).unwrap()).unwrap();
        assert_eq!(layout.to_string(), *form);
        assert_eq!(layout.dual().dual(), layout);
    }
    let mesh = Mesh::parse("a=2,dp=2").unwrap();
    for form in &bad {
        assert!(Layout::parse(form, &mesh).is_err(), "`{form}` is no layout");
    }
    assert_eq!((ok.len(), bad.len()), (7, 15));
}

#[test]
fn ranges_of_shards_match_golden_data() {
    let golden = golden();
    let check = |case: &Value, resplit: bool| {
        let sizes: Vec<usize> = list(case, "sizes").iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let at: Vec<usize> = list(case, "coordinate").iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let named: Vec<(&str, usize)> = ["a", "b", "c"].into_iter().zip(sizes.iter().copied()).collect();
        let mesh = Mesh::new(&named).unwrap();
        let (extent, grain) = (number(case, "extent"), number(case, "grain"));
        let range = if resplit {
            // Mutation, a plausible wrong rule: each axis splits the range that the outer axes leave.
            sizes
                .iter()
                .zip(&at)
                .fold(0..extent, |r, (k, c)| r.start + r.len() * c / k..r.start + r.len() * (c + 1) / k)
        } else {
            Dim { extent, grain, axes: mesh.axes().collect() }.range(&mesh, &at)
        };
        [range.start, range.end] == [0, 1].map(|i| case["range"][i].as_u64().unwrap() as usize)
    };
    let cases = list(&golden, "ranges");
    assert!(cases.iter().all(|c| check(c, false)));
    assert!(cases.iter().any(|c| !check(c, true)), "the wrong rule is detected");
    assert_eq!(cases.len(), 160);
}

#[test]
fn steps_costs_and_adjoints_match_golden_data() {
    let golden = golden();
    let cases = list(&golden, "steps");
    let mut num_detected = 0;
    for case in cases {
        let mesh = mesh_of(case);
        let from = Layout::parse(text(case, "src"), &mesh).unwrap();
        let axes: AxisSet = texts(case, "axes").iter().map(|a| mesh.axis(a).unwrap()).collect();
        let step = Step { axes, to: state_of(&case["to"]), grain: None };
        let to = from.after(&step);
        assert_eq!(to.to_string(), text(case, "dst"), "{case}");
        assert_eq!(elements_moved(&from, &step) as usize, number(case, "forward"), "{case}");
        assert_eq!(elements_moved_backward(&from, &step) as usize, number(case, "backward"), "{case}");
        let back = adjoint(&from, &step);
        assert_eq!(
            [to.dual().to_string(), to.dual().after(&back).to_string()].to_vec(),
            texts(case, "adjoint")
        );
        num_detected += usize::from(elements_moved(&from, &step) as usize != number(case, "backward"));
    }
    assert!(num_detected > 100, "an adjoint with the cost of its forward step is detected");
    assert_eq!(cases.len(), 360);
}

#[test]
fn routes_are_as_cheap_and_as_short_as_golden_data() {
    let golden = golden();
    let cases = list(&golden, "routes");
    let mut num_detected = 0;
    for case in cases {
        let mesh = mesh_of(case);
        let (from, to) = (
            Layout::parse(text(case, "src"), &mesh).unwrap(),
            Layout::parse(text(case, "dst"), &mesh).unwrap(),
        );
        let found = route(&from, &to, true).unwrap();
        let expected = (number(case, "elements") as u64, number(case, "steps"));
        assert_eq!((found.elements(), found.steps.len()), expected, "{case}: {:?}", found.steps);
        assert_eq!(found.steps.iter().fold(from.clone(), |l, s| l.after(s)), to);
        let blind = route(&from, &to, false).unwrap();
        assert!(blind.forward <= found.forward && blind.backward == 0, "{case}");
        let mut at = from.clone();
        let mut cost = blind.forward;
        for step in &blind.steps {
            cost += elements_moved_backward(&at, step);
            at = at.after(step);
        }
        num_detected += usize::from(cost > found.elements());
    }
    assert!(num_detected > 0, "a search that ignores the adjoints is detected");
    assert_eq!(cases.len(), 240);
}

#[test]
fn reshapes_that_split_a_dim_match_golden_data() {
    let golden = golden();
    let cases = list(&golden, "reshape_split");
    let (mut legal, mut filled) = (0, 0);
    for case in cases {
        let mesh = Mesh::new(&[("a", number(case, "axis"))]).unwrap();
        let (a, b, grain) = (number(case, "A"), number(case, "B"), number(case, "grain"));
        let dim = Dim::sharded(a * b, [Axis(0)]).with_grain(grain);
        let from = Layout::new(&mesh, DType::F32, [dim], AxisSet::EMPTY, AxisSet::EMPTY).unwrap();
        let got = reshape_layout(&from, &[a, b]);
        match (case["grain_on_a"].as_u64(), got) {
            (Some(grain), Ok(to)) => {
                let on_a = Dim::sharded(a, [Axis(0)]).with_grain(grain as usize);
                assert_eq!(to.dims(), [on_a, Dim::unsharded(b)], "{case}");
                legal += 1;
            }
            // A dim A of extent 1 needs no axis, so all axes shard B.
            (None, Ok(to)) => {
                assert_eq!((a, to.dims()), (1, &[Dim::unsharded(1), Dim { extent: b, ..dim }][..]), "{case}");
                filled += 1;
            }
            (None, Err(refusal)) => assert_eq!(refusal.code, "reshape", "{case}"),
            (Some(_), Err(refusal)) => panic!("{case}: {refusal}"),
        }
    }
    assert_eq!((cases.len(), legal, filled), (136, 107, 8));
}

/// An op of the golden data.
struct Op<'a> {
    mesh: Mesh,
    signature: Signature,
    linear_in: Vec<Vec<usize>>,
    differentiable: Vec<bool>,
    group: &'a Value,
}

impl<'a> Op<'a> {
    fn new(group: &'a Value) -> Op<'a> {
        let numbers =
            |v: &Value| v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as usize).collect();
        Op {
            mesh: mesh_of(group),
            signature: Signature::parse(text(group, "signature")).unwrap(),
            linear_in: list(group, "linear_in").iter().map(numbers).collect(),
            differentiable: list(group, "differentiable").iter().map(|d| d.as_bool().unwrap()).collect(),
            group,
        }
    }

    /// Unsharded layouts of the right extents, for outputs with labels that no argument has.
    fn want(&self, args: &[&Layout]) -> Vec<Layout> {
        let leading = number(self.group, "leading_dims");
        let shape = |terms: &Vec<shardgrad_tensor::Term>| {
            let mut shape = Vec::new();
            for term in terms {
                let name = self.signature.name(*term);
                let of = |name: &str| number(&self.group["extents"], name);
                match term.mark {
                    shardgrad_tensor::Mark::Ellipsis => {
                        shape.extend((0..leading).map(|i| of(&format!("{name}{i}"))))
                    }
                    shardgrad_tensor::Mark::Unit => shape.push(1),
                    _ => shape.push(of(name)),
                }
            }
            shape
        };
        let outputs = self.signature.outputs().iter();
        outputs.map(|t| Layout::invariant(args[0].mesh(), DType::F32, &shape(t))).collect()
    }

    fn infer(&self, args: &[&Layout]) -> Result<Inference, Refusal> {
        let groups: Vec<&[usize]> = self.linear_in.iter().map(Vec::as_slice).collect();
        let rule =
            Rule { signature: &self.signature, linear_in: &groups, differentiable: &self.differentiable };
        let dtypes = vec![DType::F32; self.signature.num_outputs()];
        match infer(&rule, args, &dtypes, &[]) {
            Err(refusal) if refusal.code == "shape" => {
                let want = self.want(args);
                infer(&rule, args, &dtypes, &want.iter().map(Some).collect::<Vec<_>>())
            }
            other => other,
        }
    }

    fn args(&self, case: &Value) -> Vec<Layout> {
        texts(case, "in").iter().map(|t| Layout::parse(t, &self.mesh).unwrap()).collect()
    }

    /// Our result for a case, in the format of the golden data.
    fn answer(&self, case: &Value) -> Value {
        let layouts = self.args(case);
        let args: Vec<&Layout> = layouts.iter().collect();
        let mut answer = serde_json::json!({ "in": case["in"] });
        match self.infer(&args) {
            Ok(inference) => {
                let (mut now, mut paid, mut forward, mut backward) = (layouts.clone(), false, 0, 0);
                for &ImplicitStep { arg: i, axis, to: state } in &inference.steps {
                    let step = Step::new(axis, state);
                    paid |= now[i].placement(axis) == Placement::Partial;
                    forward += elements_moved(&now[i], &step);
                    let counts = self.differentiable[i] && now[i].dtype().is_float();
                    backward += if counts { elements_moved_backward(&now[i], &step) } else { 0 };
                    now[i] = now[i].after(&step);
                }
                for ((before, after), target) in layouts.iter().zip(&now).zip(&inference.targets) {
                    assert_eq!(
                        target.as_ref(),
                        (before != after).then_some(after),
                        "targets follow from steps"
                    );
                }
                let steps: Vec<String> =
                    inference.steps.iter().map(|s| written_step(*s, &self.mesh)).collect();
                let kind = if paid {
                    "complete"
                } else if steps.is_empty() {
                    "direct"
                } else {
                    "cast"
                };
                let out: Vec<String> = inference.outputs.iter().map(Layout::to_string).collect();
                for (key, value) in [("kind", kind.into()), ("steps", steps.into()), ("out", out.into())] {
                    answer[key] = value;
                }
                (answer["forward"], answer["backward"]) = (forward.into(), backward.into());
            }
            Err(refusal) => {
                answer["refuse"] = refusal.code.into();
                if case.get("repairs").is_some() {
                    answer["repairs"] = self.repairs(&args, &refusal);
                }
                if refusal.code == "conflict" {
                    answer["why"] = why(&refusal.message).into();
                } else {
                    answer["why"] = case["why"].clone();
                }
            }
        }
        answer
    }

    fn repairs(&self, args: &[&Layout], refusal: &Refusal) -> Value {
        let found =
            repairs(args, &self.differentiable, refusal, &RouteCache::default(), &|args| self.infer(args));
        let one = |repair: &shardgrad_tensor::Repair| {
            let steps: Vec<String> = repair
                .changes
                .iter()
                .map(|(i, to)| match to {
                    shardgrad_tensor::RepairAction::Exchange(axis, d) => written_step(
                        ImplicitStep { arg: *i, axis: *axis, to: Placement::Shard(*d) },
                        &self.mesh,
                    ),
                    shardgrad_tensor::RepairAction::Gather(axis) => written_step(
                        ImplicitStep { arg: *i, axis: *axis, to: Placement::Replicate },
                        &self.mesh,
                    ),
                    shardgrad_tensor::RepairAction::Adopt(..) => {
                        panic!("on one axis there is only one order of axes")
                    }
                })
                .collect();
            let out: Vec<String> = repair.outputs.iter().map(Layout::to_string).collect();
            serde_json::json!({ "steps": steps, "elements": repair.elements, "out": out })
        };
        found.iter().map(one).collect()
    }
}

/// Axis and labels of a conflict, from our error text, in the format of the golden data.
fn why(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let (axis, mut labels) = (quoted[0], [quoted[1], quoted[2]]);
    labels.sort_unstable();
    format!("axis {axis} splits labels {} and {}", labels[0], labels[1])
}

/// The cases of the `ops` section whose result differs from the golden data, and the number of cases of each kind.
fn disagreements(golden: &Value, mutate: impl Fn(&mut Op<'_>)) -> (Vec<String>, BTreeMap<String, usize>) {
    let (mut wrong, mut count) = (Vec::new(), BTreeMap::new());
    for group in list(golden, "ops") {
        let mut op = Op::new(group);
        mutate(&mut op);
        for case in list(group, "cases") {
            let kind =
                case.get("kind").or(case.get("refuse")).and_then(Value::as_str).expect("accepted or refused");
            *count.entry(kind.to_string()).or_default() += 1;
            *count.entry("repairs".to_string()).or_default() +=
                case.get("repairs").map_or(0, |r| r.as_array().unwrap().len());
            let answer = op.answer(case);
            if answer != *case {
                wrong.push(format!("{} on {}: expected {case}, got {answer}", text(group, "op"), op.mesh));
            }
        }
    }
    (wrong, count)
}

#[test]
fn inference_of_every_op_matches_golden_data() {
    let golden = golden();
    let (wrong, count) = disagreements(&golden, |_| {});
    assert!(wrong.is_empty(), "{} cases differ, the first: {}", wrong.len(), wrong[0]);
    let expected = [
        ("cast", 835),
        ("complete", 999),
        ("conflict", 651),
        ("direct", 598),
        ("one", 32),
        ("order", 276),
        ("repairs", 1423),
        ("whole", 461),
    ];
    assert_eq!(count, expected.map(|(k, n)| (k.to_string(), n)).into());
    assert_eq!(list(&golden, "ops").len(), 82);
}

#[test]
fn wrong_declarations_of_ops_are_detected() {
    let golden = golden();
    let is = |op: &Op<'_>, name: &str| text(op.group, "op") == name;
    let joint_mul = |op: &mut Op<'_>| {
        if is(op, "mul") {
            op.linear_in = vec![vec![0, 1]];
        }
    };
    let split_softmax = |op: &mut Op<'_>| {
        if is(op, "softmax") {
            op.signature = Signature::parse("..m d -> ..m d").unwrap();
        }
    };
    let linear_silu = |op: &mut Op<'_>| {
        if is(op, "silu") {
            op.linear_in = vec![vec![0]];
        }
    };
    let real_indices = |op: &mut Op<'_>| {
        if is(op, "where") {
            op.differentiable = vec![true; 3];
        }
    };
    assert!(!disagreements(&golden, joint_mul).0.is_empty());
    assert!(!disagreements(&golden, split_softmax).0.is_empty());
    assert!(!disagreements(&golden, linear_silu).0.is_empty());
    // The mask is an integer tensor, which never has a cotangent, whatever the op declares.
    assert!(disagreements(&golden, real_indices).0.is_empty());
}

#[test]
fn requested_layouts_determine_new_labels() {
    let golden = golden();
    let cases = list(&golden, "want");
    for case in cases {
        let mesh = mesh_of(case);
        let layouts: Vec<Layout> =
            texts(case, "in").iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect();
        let args: Vec<&Layout> = layouts.iter().collect();
        let want = Layout::parse(text(case, "want"), &mesh).unwrap();
        let signature = Signature::parse(text(case, "signature")).unwrap();
        let (linear, differentiable): (&[&[usize]], &[bool]) = match text(case, "op") {
            "embedding_bwd" => (&[&[1]], &[false, true]),
            "expand" => (&[&[0]], &[true]),
            other => panic!("no declaration is known for {other}"),
        };
        let rule = Rule { signature: &signature, linear_in: linear, differentiable };
        let got = infer(&rule, &args, &[DType::F32], &[Some(&want)]).unwrap();
        let steps: Vec<String> = got.steps.iter().map(|s| written_step(*s, &mesh)).collect();
        assert_eq!(
            (steps, got.outputs[0].to_string().as_str()),
            (texts(case, "steps").iter().map(|s| s.to_string()).collect(), text(case, "out"))
        );
    }
    assert_eq!(cases.len(), 6);
}
