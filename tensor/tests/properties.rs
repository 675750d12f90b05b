//! Property-based tests of layouts and layout inference.

use proptest::prelude::*;
use shardgrad_dist::{Axis, AxisSet, Mesh};
use shardgrad_kernels::DType;
use shardgrad_tensor::{AxisList, Dim, Inference, Layout, Rule, Signature, infer};

/// Random layouts: extents and grains, and for each of six axes of sizes 1 to 3 a dim, `+`, `~` or `=`.
fn layout() -> impl Strategy<Value = Layout> {
    let dims = prop::collection::vec((0usize..5, 1usize..4), 0..4);
    let sizes = prop::collection::vec(1usize..4, 6);
    (dims, sizes, prop::collection::vec(0usize..7, 6), Just([5, 2, 0, 3, 1, 4]).prop_shuffle()).prop_map(
        |(dims, sizes, places, order)| {
            let names = ["zeta", "b", "tp", "a_1", "dp", "_x"];
            let named: Vec<(&str, usize)> = names.into_iter().zip(sizes).collect();
            let mesh = Mesh::new(&named).unwrap();
            let mut lists = vec![AxisList::EMPTY; dims.len()];
            let mut marks = [AxisSet::EMPTY; 2];
            for i in order {
                let axis = Axis(i as u8);
                match places[i] {
                    place if place < lists.len() => lists[place] = lists[place].with(axis),
                    place @ (5 | 6) => marks[place - 5] = marks[place - 5].with(axis),
                    _ => {}
                }
            }
            let dims = dims.iter().zip(lists).map(|((n, grain), axes)| Dim {
                extent: n * grain,
                grain: *grain,
                axes,
            });
            Layout::new(&mesh, DType::BF16, dims, marks[0], marks[1]).unwrap()
        },
    )
}

/// Whether on every rank every argument, after its steps, has the ranges of its labels.
fn ranges_fit(signature: &Signature, args: &[&Layout], got: &Inference) -> bool {
    let mesh = args[0].mesh();
    let labels = signature.bind(|i| args[i].ndim(), |_| None).unwrap();
    let places = labels.inputs().iter().zip(args).zip(&got.targets);
    places
        .flat_map(|((places, arg), target)| {
            let layout = target.as_ref().unwrap_or(arg);
            places.iter().enumerate().map(move |(d, x)| (layout, d, *x))
        })
        .chain(labels.outputs()[0].iter().enumerate().map(|(d, x)| (&got.outputs[0], d, *x)))
        .all(|(layout, d, x)| {
            (0..mesh.num_ranks())
                .map(|r| mesh.coordinate(r))
                .all(|at| layout.range(d, &at) == got.label(&labels.name(x), mesh, &at).1)
        })
}

proptest! {
    #[test]
    fn arguments_have_the_ranges_of_their_labels(
        grains in prop::collection::vec(prop::sample::select(vec![1usize, 2, 3, 4, 6]), 4),
        lists in prop::collection::vec(prop::sample::select(vec!["", "@a", "@b", "@a@b"]), 4),
    ) {
        let mesh = Mesh::parse("a=2,b=3").unwrap();
        let text = |i: usize, j: usize| format!("f32[12:{}{}, 24:{}{}]", grains[i], lists[i], grains[j], lists[j]);
        let (Ok(x), Ok(w)) = (Layout::parse(&text(0, 1), &mesh), Layout::parse(&text(2, 3), &mesh)) else {
            return Ok(());
        };
        let signature = Signature::parse("m k, m k -> m k").unwrap();
        let rule = Rule { signature: &signature, linear_in: &[&[0, 1]], differentiable: &[] };
        if let Ok(got) = infer(&rule, &[&x, &w], &[DType::F32], &[]) {
            prop_assert!(ranges_fit(&signature, &[&x, &w], &got), "{} and {}: {:?}", x, w, got);
        }
    }

    #[test]
    fn layout_text_round_trips(layout in layout()) {
        prop_assert_eq!(Layout::parse(&layout.to_string(), layout.mesh()).unwrap(), layout);
    }

    #[test]
    fn ranges_tile_every_dim(layout in layout()) {
        let mesh = layout.mesh().clone();
        for (d, dim) in layout.dims().iter().enumerate() {
            let mut seen = vec![0; dim.extent];
            for rank in 0..mesh.num_ranks() {
                let at = mesh.coordinate(rank);
                prop_assert!(layout.range(d, &at).len() <= dim.max_local_extent(&mesh));
                layout.range(d, &at).for_each(|i| seen[i] += 1);
            }
            prop_assert!(seen.iter().all(|n| *n == mesh.num_ranks() / dim.axes.num_shards(&mesh)));
        }
    }
}
