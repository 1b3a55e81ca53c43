# Completion of groups, choices and keys for bash. In the folder of the project:
#
#   source scripts/completion.bash                                  # in this shell
#   echo "source '$PWD/scripts/completion.bash'" >> ~/.bashrc       # in every new one
#
# Hydra knows the words (python train.py -sc query=bash). Its own function for bash would also start
# every other script at which you press Tab, so this one asks for train.py and three commands only.
_samestep_complete() {
    local python=${COMP_WORDS[0]} program=${COMP_WORDS[1]#./} line="python train.py" word index
    case $program in
        train.py) ;;
        doctor | launch | sweep) python=${python%samestep}python ;; # the one beside it
        *) return ;; # names of files
    esac
    [[ -f train.py && $COMP_CWORD -gt 1 ]] || return
    for ((index = 2; index < COMP_CWORD; index++)); do
        case ${COMP_WORDS[index]} in
            # Words for samestep launch and sweep, which Hydra does not know.
            --check | --render | --data | sweep=* | n_trials=* | trials_at_once=*) ;;
            *) line+=" ${COMP_WORDS[index]}" ;;
        esac
    done
    word=${COMP_WORDS[COMP_CWORD]}
    local words
    words=$(COMP_LINE="$line $word" COMP_POINT=${#line} "$python" train.py -sc query=bash 2> /dev/null)
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/} # model=mlp is one word
complete -o nospace -o default -F _samestep_complete python python3 samestep
