#!/bin/sh
# Prints what may stand at the end of a command line, which a shell asks when you press Tab.
#
#   sh words.sh python train.py model=ml
#   sh words.sh samestep launch cluster=k
#
# Hydra knows the words. Its own functions would also start every other script at which you press Tab,
# so this asks train.py and three commands only; for others the shell completes names of files.
python=$1 program=${2#./}
case ${python##*/} in
    samestep)
        [ $# -gt 2 ] || exec sh -c '"$0" --help | sed -n "s/^  samestep \($1[a-z]*\).*/\1/p"' "$python" "$program"
        python=${python%samestep}python # the one beside it
        case $program in doctor | launch | sweep) ;; *) exit ;; esac
        ;;
    *) [ "$program" = train.py ] || exit ;;
esac
{ [ -f train.py ] && [ $# -gt 2 ]; } || exit 0
shift 2
line="python train.py"
while [ $# -gt 1 ]; do
    case $1 in
        # Words for samestep launch and sweep, which Hydra does not know.
        --check | --render | --data | sweep=* | n_trials=* | trials_at_once=*) ;;
        *) line="$line $1" ;;
    esac
    shift
done
COMP_LINE="$line $1" COMP_POINT=${#line} exec "$python" train.py -sc query=bash
