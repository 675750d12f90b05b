//! Shrinking: the smallest program that fails in the same way, found by removing steps, outputs, layouts, axes and
//! extents one by one.

use super::layout_pattern::LayoutPattern;
use super::program::{Program, Step, ValueRef};
use shardgrad_dist::Mesh;
use shardgrad_tensor::DType;
use shardgrad_tensor::ops::Input;
use std::collections::BTreeSet;

/// The largest number of smaller programs to try.
const TRIES_MAX: usize = 3_000;

impl Program {
    /// The smallest program found for which `fails` still holds.
    #[must_use]
    pub fn shrunk(&self, fails: impl Fn(&Program) -> bool) -> Program {
        let (mut least, mut tries) = (self.clone(), 0);
        loop {
            let smaller = least.smaller().into_iter().find(|candidate| {
                tries += 1;
                tries <= TRIES_MAX && fails(candidate)
            });
            match smaller {
                Some(candidate) => least = candidate,
                None => return least,
            }
        }
    }

    /// Programs with one thing less.
    fn smaller(&self) -> Vec<Program> {
        let mut found = Vec::new();
        let outputs: Vec<Program> =
            self.outputs.iter().map(|p| Program { outputs: vec![*p], ..self.clone() }).collect();
        found.extend(outputs.into_iter().filter(|_| self.outputs.len() > 1));
        for step in (0..self.steps.len()).rev() {
            found.extend(self.without_step(step, None));
            let args = self.steps[step].args();
            found.extend(args.into_iter().filter_map(|arg| self.without_step(step, Some(arg))));
        }
        found.extend((0..self.inputs.len()).rev().filter_map(|i| self.without_input(i)));
        for at in 0..self.blocks.len() {
            let mut one = self.clone();
            let block = one.blocks.remove(at);
            found.push(one.clone());
            for part in [block.start + 1..block.end, block.start..block.end - 1] {
                let mut less = one.clone();
                less.blocks.extend((!part.is_empty()).then_some(part));
                found.push(less);
            }
        }
        found.extend(self.plainer());
        found.extend(self.smaller_meshes());
        found.extend(self.smaller_shapes());
        found
    }

    /// The program without a step, whose output is replaced by another value or removed with all that depends on it.
    fn without_step(&self, gone: usize, by: Option<ValueRef>) -> Option<Program> {
        let mut less = self.clone();
        less.steps.remove(gone);
        let renamed = |p: ValueRef| match p {
            ValueRef::Output(step, _) if step == gone => by,
            ValueRef::Output(step, out) if step > gone => Some(ValueRef::Output(step - 1, out)),
            other => Some(other),
        };
        for at in gone..less.steps.len() {
            for arg in less.steps[at].args_mut() {
                *arg = renamed(*arg)?;
            }
        }
        less.outputs = less.outputs.iter().filter_map(|p| renamed(*p)).collect();
        if less.outputs.is_empty() {
            return None;
        }
        let moved = |at: usize| if at > gone { at - 1 } else { at };
        less.blocks =
            less.blocks.iter().map(|b| moved(b.start)..moved(b.end)).filter(|b| !b.is_empty()).collect();
        Some(less)
    }

    /// The program without an unused input. Input values depend on the input's number, so the last inputs go first.
    fn without_input(&self, gone: usize) -> Option<Program> {
        let used = self.steps.iter().flat_map(Step::args).chain(self.outputs.iter().copied());
        if used.into_iter().any(|p| p == ValueRef::Input(gone)) {
            return None;
        }
        let mut less = self.clone();
        less.inputs.remove(gone);
        let rename = |p: &mut ValueRef| {
            if let ValueRef::Input(i) = p
                && *i > gone
            {
                *i -= 1;
            }
        };
        less.steps.iter_mut().flat_map(Step::args_mut).for_each(rename);
        less.outputs.iter_mut().for_each(rename);
        Some(less)
    }

    /// The program in f64, with plainer layouts, without `no_grad`, or with a constant for a leaf.
    fn plainer(&self) -> Vec<Program> {
        let mut found = Vec::new();
        if self.dtype != DType::F64 {
            found.push(Program { dtype: DType::F64, ..self.clone() });
        }
        for (i, input) in self.inputs.iter().enumerate() {
            let unsharded = LayoutPattern::unsharded(input.input.shape().len());
            let mut axes = self.axes();
            axes.push((String::new(), 0));
            for (axis, _) in &axes {
                let pattern = if axis.is_empty() { unsharded.clone() } else { input.layout.without(axis) };
                if pattern != input.layout {
                    let mut less = self.clone();
                    less.inputs[i].layout = pattern;
                    found.push(less);
                }
            }
            if input.is_leaf {
                let mut less = self.clone();
                less.inputs[i].is_leaf = false;
                found.push(less);
            }
        }
        for (at, step) in self.steps.iter().enumerate() {
            if let Step::Apply { no_grad: true, .. } = step {
                let mut less = self.clone();
                if let Step::Apply { no_grad, .. } = &mut less.steps[at] {
                    *no_grad = false;
                }
                found.push(less);
            }
        }
        found
    }

    /// Names and sizes of the axes.
    fn axes(&self) -> Vec<(String, usize)> {
        let mesh = Mesh::parse(&self.mesh).expect("the mesh of a program that ran");
        mesh.axes().map(|a| (mesh.name(a).to_string(), mesh.size(a))).collect()
    }

    fn on_axes(&self, axes: &[(String, usize)], gone: Option<&str>) -> Program {
        let mut less = self.clone();
        less.mesh = axes.iter().map(|(name, size)| format!("{name}={size}")).collect::<Vec<_>>().join(",");
        if let Some(gone) = gone {
            less.inputs.iter_mut().for_each(|f| f.layout = f.layout.without(gone));
            for step in &mut less.steps {
                if let Step::Redistribute(_, pattern) = step {
                    *pattern = pattern.without(gone);
                }
            }
        }
        less
    }

    fn smaller_meshes(&self) -> Vec<Program> {
        let axes = self.axes();
        let mut found = Vec::new();
        for at in 0..axes.len() {
            let mut fewer = axes.clone();
            let (name, size) = fewer.remove(at);
            found.push(self.on_axes(&fewer, Some(&name)));
            for smaller in 2..size {
                let mut axes = axes.clone();
                axes[at].1 = smaller;
                found.push(self.on_axes(&axes, None));
            }
        }
        found
    }

    /// The program with one extent smaller wherever it occurs, so that equal extents stay equal.
    fn smaller_shapes(&self) -> Vec<Program> {
        let all: BTreeSet<usize> = self.inputs.iter().flat_map(|f| f.input.shape().to_vec()).collect();
        let mut found = Vec::new();
        for &old in all.iter().rev() {
            for new in [1, 2, old.saturating_sub(1)].into_iter().filter(|n| *n < old && *n > 0) {
                let mut less = self.clone();
                for input in &mut less.inputs {
                    let shape = input.input.shape().iter().map(|n| if *n == old { new } else { *n });
                    let shape: Vec<usize> = shape.collect();
                    input.input = match &input.input {
                        Input::Index(_, bound) => {
                            Input::Index(shape, if *bound == old { new } else { *bound })
                        }
                        other => other.with_shape(&shape),
                    };
                }
                found.push(less);
            }
        }
        found
    }
}
