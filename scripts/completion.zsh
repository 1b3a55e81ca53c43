# Completion for zsh of train.py and samestep. In ~/.zshrc, after compinit:
#
#   source FOLDER_OF_THE_PROJECT/scripts/completion.zsh
_samestep_folder=${${(%):-%x}:A:h}
_samestep_complete() {
    local -a found=($(sh $_samestep_folder/complete.sh "${(@)words[1,CURRENT]}" 2> /dev/null))
    if (( $#found )); then
        compadd -S '' -a found
    else
        _files
    fi
}
compdef _samestep_complete python python3 samestep
