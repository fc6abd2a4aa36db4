(* The associative merge of notebook 04, in a form that a machine checks: `make proofs`.

   First come the definitions and what is claimed, which you need to read. Then come the proofs,
   which Coq reads for you. The numbers are real numbers, not floats. `forall` is "for all", `->`
   "implies", `/\` "and", `f x y` is f(x, y), `x :: l` a list that begins with x, `k ++ l` one list
   after the other, and `Some x` and `None` are a value and its absence. *)

Require Import Reals Lra List Permutation FunctionalExtensionality.
Import ListNotations.
Open Scope R_scope.

Section Values.
Variable coordinate : Type. (* the names of a value's coordinates, as many as you like *)
Definition vector := coordinate -> R.

(* -------------------------------------------------- keys, and the attention that is wanted *)

Definition key : Type := R * vector. (* its score for one query, and its value *)
Definition score (x : key) : R := fst x.
Definition value (x : key) : vector := snd x.

Fixpoint sum (f : key -> R) (keys : list key) : R :=
  match keys with [] => 0 | x :: rest => f x + sum f rest end.

Definition mass (keys : list key) : R := sum (fun x => exp (score x)) keys.
Definition moment (keys : list key) : vector :=
  fun i => sum (fun x => exp (score x) * value x i) keys.
Definition softmax (keys : list key) (x : key) : R := exp (score x) / mass keys.
Definition attention (keys : list key) : vector :=
  fun i => sum (fun x => softmax keys x * value x i) keys.
Definition lse (keys : list key) : option R := (* None is the logarithm of 0 *)
  match keys with [] => None | _ => Some (ln (mass keys)) end.

(* -------------------------------------------------- states, their merge, trees of merges *)

Definition state : Type := option (R * R * vector). (* None, or Some (m, d, n) with real m, d, n *)

Definition merge (a b : state) : state :=
  match a, b with
  | None, x | x, None => x
  | Some (ma, da, na), Some (mb, db, nb) =>
      let m := Rmax ma mb in
      let wa := exp (ma - m) in
      let wb := exp (mb - m) in
      Some (m, da * wa + db * wb, fun i => na i * wa + nb i * wb)
  end.

Definition finalize (a : state) : vector * option R :=
  match a with
  | None => (fun _ => 0, None)
  | Some (m, d, n) => (fun i => n i / d, Some (m + ln d))
  end.

Inductive tree := Empty | Leaf (x : key) | Node (left right : tree).

Fixpoint leaves (t : tree) : list key :=
  match t with Empty => [] | Leaf x => [x] | Node l r => leaves l ++ leaves r end.

Fixpoint reduce (t : tree) : state :=
  match t with
  | Empty => None
  | Leaf x => Some (score x, 1, value x)
  | Node l r => merge (reduce l) (reduce r)
  end.

(* ============================================================ What is claimed *)

(* 04, "Why any order will do": (ab)c and a(bc) agree in every field, with their true maxima. *)
Definition merge_is_associative : Prop :=
  forall a b c : state, merge (merge a b) c = merge a (merge b c).

(* 04, "Why any order will do": the order of two states does not matter. *)
Definition merge_is_commutative : Prop :=
  forall a b : state, merge a b = merge b a.

(* 04, "No keys: the identity": the state of no keys changes no state. *)
Definition no_keys_are_the_identity : Prop :=
  forall a : state, merge None a = a /\ merge a None = a.

(* 04, "A tree, step by step": two trees with the same keys, in any order, with empty leaves
   anywhere, give the same state in every field. A chain is a tree, too. *)
Definition any_tree_gives_the_same_state : Prop :=
  forall t u : tree, Permutation (leaves t) (leaves u) -> reduce t = reduce u.

(* 04, "A state, and two that merge": that state is finalized to softmax attention and its lse;
   a tree without keys, to 0 and no lse. *)
Definition any_tree_gives_attention : Prop :=
  forall t : tree, finalize (reduce t) = (attention (leaves t), lse (leaves t)).

(* 04, "Could a shard send less?": if no further key c tells two shards apart by the attention
   over shard and c, they have the same mass and the same moment. A value has a coordinate i. *)
Definition contexts_see_mass_and_moment : Prop :=
  forall (i : coordinate) (k l : list key),
  (forall c : key, attention (k ++ [c]) = attention (l ++ [c])) ->
  mass k = mass l /\ moment k = moment l.

(* 01: attention's coordinate i is the derivative by z, at z = 0, of log-sum-exp of s + z * v_i. *)
Definition attention_is_the_gradient_of_lse : Prop :=
  forall (i : coordinate) (keys : list key), keys <> [] ->
  derivable_pt_lim (fun z => ln (sum (fun x => exp (score x + z * value x i)) keys)) 0
    (attention keys i).

(* ============================================================ The proofs *)

Lemma chain_exp : forall x y z, exp (x - y) * exp (y - z) = exp (x - z).
Proof. intros. rewrite <- exp_plus. f_equal. lra. Qed.

Lemma back : forall x m, exp (x - m) * exp m = exp x.
Proof. intros. rewrite <- exp_plus. f_equal. lra. Qed.

Theorem commutative : merge_is_commutative.
Proof.
  intros [[[ma da] na]|] [[[mb db] nb]|]; simpl; auto.
  rewrite (Rmax_comm mb ma).
  do 2 f_equal; [f_equal; ring | extensionality i; ring].
Qed.

Theorem associative : merge_is_associative.
Proof.
  intros [[[ma da] na]|] [[[mb db] nb]|] [[[mc dc] nc]|]; simpl; auto.
  rewrite (Rmax_assoc ma mb mc).
  do 2 f_equal; [f_equal | extensionality i];
    rewrite !Rmult_plus_distr_r, !Rmult_assoc, !chain_exp; ring.
Qed.

Theorem identity : no_keys_are_the_identity.
Proof. intros [[[m d] n]|]; auto. Qed.

(* Every tree gives the state of the chain over its leaves; chains may swap neighbours. *)
Definition leaf (x : key) : state := Some (score x, 1, value x).
Definition chain (keys : list key) (s : state) : state :=
  fold_right (fun x => merge (leaf x)) s keys.

Lemma chain_onto : forall keys s, merge (chain keys None) s = chain keys s.
Proof.
  induction keys; intros; cbn [chain fold_right]; [apply identity |].
  rewrite associative. f_equal. apply IHkeys.
Qed.

Lemma tree_is_chain : forall t, reduce t = chain (leaves t) None.
Proof.
  induction t; cbn [reduce leaves].
  - reflexivity.
  - reflexivity.
  - rewrite IHt1, IHt2, chain_onto. unfold chain. rewrite fold_right_app. reflexivity.
Qed.

Theorem any_tree : any_tree_gives_the_same_state.
Proof.
  intros t u same. rewrite !tree_is_chain.
  induction same; cbn.
  - reflexivity.
  - fold (chain l None) (chain l' None). rewrite IHsame. reflexivity.
  - change (merge (leaf y) (merge (leaf x) (chain l None)) =
      merge (leaf x) (merge (leaf y) (chain l None))).
    rewrite <- !associative, (commutative (leaf y)). reflexivity.
  - congruence.
Qed.

(* What a state stands for, mass and moment, adds. *)
Definition mass_of (a : state) : R := match a with None => 0 | Some (m, d, _) => d * exp m end.
Definition moment_of (a : state) : vector :=
  fun i => match a with None => 0 | Some (m, _, n) => n i * exp m end.

Lemma mass_adds : forall a b, mass_of (merge a b) = mass_of a + mass_of b.
Proof.
  intros [[[ma da] na]|] [[[mb db] nb]|]; simpl; try lra.
  rewrite Rmult_plus_distr_r, !Rmult_assoc, !back. reflexivity.
Qed.

Lemma moment_adds : forall a b i, moment_of (merge a b) i = moment_of a i + moment_of b i.
Proof.
  intros [[[ma da] na]|] [[[mb db] nb]|] i; simpl; try lra.
  rewrite Rmult_plus_distr_r, !Rmult_assoc, !back. reflexivity.
Qed.

Lemma sum_app : forall f k l, sum f (k ++ l) = sum f k + sum f l.
Proof. induction k; simpl; intros; [lra | rewrite IHk; lra]. Qed.

(* So any tree has the mass and the moment of its keys, and their quotient is attention. *)
Lemma mass_stays : forall t, mass_of (reduce t) = mass (leaves t).
Proof.
  unfold mass. induction t; cbn [reduce leaves]; [simpl; lra | simpl; lra |].
  rewrite mass_adds, sum_app. lra.
Qed.

Lemma moment_stays : forall t i, moment_of (reduce t) i = moment (leaves t) i.
Proof.
  unfold moment. intros t i. induction t; cbn [reduce leaves]; [simpl; lra | simpl; lra |].
  rewrite moment_adds, sum_app. lra.
Qed.

Lemma mass_nonnegative : forall keys, 0 <= mass keys.
Proof.
  unfold mass. induction keys; simpl; [lra |]. generalize (exp_pos (score a)). lra.
Qed.

Lemma mass_positive : forall keys, keys <> [] -> 0 < mass keys.
Proof.
  intros [|x keys] some; [congruence |]. unfold mass. simpl.
  generalize (exp_pos (score x)) (mass_nonnegative keys). unfold mass. lra.
Qed.

Lemma moment_over_mass : forall keys i, attention keys i = moment keys i / mass keys.
Proof.
  intros. unfold attention, moment, softmax, Rdiv. generalize (/ mass keys). intros w.
  induction keys; simpl; [lra | rewrite IHkeys; lra].
Qed.

Lemma without_keys : forall t, leaves t = [] <-> reduce t = None.
Proof.
  induction t; cbn [reduce leaves]; [tauto | split; discriminate |].
  destruct (reduce t1) as [[[? ?] ?]|], (reduce t2) as [[[? ?] ?]|], (leaves t1), (leaves t2);
    simpl; intuition discriminate.
Qed.

Theorem tree_attention : any_tree_gives_attention.
Proof.
  intros t. generalize (mass_stays t) (moment_stays t) (without_keys t).
  destruct (reduce t) as [[[m d] n]|]; intros same_mass same_moment none; cbn in *.
  - assert (some : leaves t <> []) by (intros E; apply none in E; discriminate).
    generalize (mass_positive _ some) (exp_pos m). intros positive m_positive.
    assert (d_positive : 0 < d) by (apply (Rmult_lt_reg_r (exp m)); lra).
    f_equal.
    + extensionality i. rewrite moment_over_mass, <- same_mass, <- same_moment. field. lra.
    + unfold lse. destruct (leaves t); [congruence |].
      rewrite <- same_mass, ln_mult, ln_exp by assumption. f_equal. lra.
  - assert (E : leaves t = []) by tauto. rewrite E. reflexivity.
Qed.

(* A key of score 0, once with the value 0 and once with the value 1, gives away d, then n. *)
Lemma recover : forall d n d' n', 0 <= d -> 0 <= d' ->
  n / (d + 1) = n' / (d' + 1) -> (n + 1) / (d + 1) = (n' + 1) / (d' + 1) -> d = d' /\ n = n'.
Proof.
  intros d n d' n' P P' at_0 at_1.
  assert (E : / (d + 1) = / (d' + 1)).
  { unfold Rdiv in *. rewrite !Rmult_plus_distr_r in at_1. lra. }
  assert (d = d').
  { replace d with ((d + 1) * ((d' + 1) * / (d' + 1)) - 1) by (field; lra).
    rewrite <- E. field. lra. }
  subst d'. split; [reflexivity |].
  apply (Rmult_eq_reg_r (/ (d + 1))); [exact at_0 |]. apply Rinv_neq_0_compat. lra.
Qed.

Theorem necessary : contexts_see_mass_and_moment.
Proof.
  intros i k l same.
  assert (H : forall u j, (moment k j + u) / (mass k + 1) = (moment l j + u) / (mass l + 1)).
  { intros u j. generalize (f_equal (fun f => f j) (same (0, fun _ => u))). cbn beta.
    rewrite !moment_over_mass. unfold moment, mass. rewrite !sum_app. cbn. rewrite exp_0.
    intros E. rewrite !Rplus_0_r, !Rmult_1_l in E. exact E. }
  assert (R : forall j, mass k = mass l /\ moment k j = moment l j).
  { intros j. apply recover; try apply mass_nonnegative.
    - generalize (H 0 j). rewrite !Rplus_0_r. auto.
    - apply H. }
  split; [apply (R i) | extensionality j; apply (R j)].
Qed.

Theorem gradient : attention_is_the_gradient_of_lse.
Proof.
  intros i keys some.
  assert (line : forall x, derivable_pt_lim (fun z => score x + z * value x i) 0 (value x i)).
  { intros x e e_positive. exists (mkposreal 1 Rlt_0_1). intros h h_not_0 _.
    replace (_ - value x i) with 0 by (field; exact h_not_0). rewrite Rabs_R0. exact e_positive. }
  assert (sums : forall k, derivable_pt_lim
    (fun z => sum (fun x => exp (score x + z * value x i)) k) 0 (moment k i)).
  { induction k as [|x k]; cbn [sum moment].
    - apply derivable_pt_lim_const.
    - apply (derivable_pt_lim_plus (fun z => exp (score x + z * value x i))); [|exact IHk].
      apply (derivable_pt_lim_comp (fun z => score x + z * value x i) exp); [apply line |].
      replace (score x + 0 * value x i) with (score x) by lra. apply derivable_pt_lim_exp. }
  assert (at_0 : sum (fun x => exp (score x + 0 * value x i)) keys = mass keys).
  { unfold mass. clear. induction keys; simpl; [reflexivity |].
    rewrite IHkeys. f_equal. f_equal. lra. }
  rewrite moment_over_mass. unfold Rdiv. rewrite Rmult_comm.
  apply (derivable_pt_lim_comp _ ln); [apply sums |].
  rewrite at_0. apply derivable_pt_lim_ln, mass_positive, some.
Qed.
End Values.

(* What the proofs rest on: the axioms with which Coq's library builds the real numbers, among them
   that two functions are equal if they agree everywhere. *)
Print Assumptions commutative.
Print Assumptions associative.
Print Assumptions identity.
Print Assumptions any_tree.
Print Assumptions tree_attention.
Print Assumptions necessary.
Print Assumptions gradient.
